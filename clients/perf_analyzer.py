"""Finds or prepares NVIDIA's perf_analyzer: on PATH, from its wheel, or with newer C libraries.

The wheel's binary needs glibc 2.38. On an older Debian the libraries of a later release are
unpacked into a private folder, and the binary is started by the loader there. Everything lies
under `$MASW_HOME` (default ~/.cache/masw); the host's own packages and apt state stay as they are.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

VERSION = "2.60.0"
RELEASE = "trixie"  # Debian's, with glibc 2.41
PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "libssl3t64", "zlib1g", "libzstd1")

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

Say = Callable[[str], None]


class PerfAnalyzerError(RuntimeError):
    """perf_analyzer cannot be had, or failed; the message says what is missing."""


def prepare_perf_analyzer(say: Say = lambda line: None) -> list[str]:
    """The command prefix of a perf_analyzer that runs on this machine, prepared where needed.

    `say` is told of steps that take seconds. The first preparation needs a network (up to a
    minute, 40 MB on disk); later calls take milliseconds. Raises PerfAnalyzerError.
    """
    on_path = shutil.which("perf_analyzer")
    if on_path and _runs([on_path]):
        return [on_path]
    folder = _home() / f"perf_analyzer-{VERSION}"
    binary = folder / "wheel" / "perf_analyzer" / "bin" / "perf_analyzer"
    if not binary.is_file():
        say(f"downloading perf_analyzer {VERSION}")
        _make(folder / "wheel", _unpack_wheel)
    if _runs([str(binary)]):
        return [str(binary)]
    if not (folder / "root").is_dir():
        say(f"fetching C libraries for perf_analyzer (this machine has {_glibc()})")
        _make(folder / "root", _unpack_libraries)
    command = _with_loader(binary, folder / "root")
    if not _runs(command):
        raise PerfAnalyzerError(
            f"perf_analyzer does not start even with the libraries in {folder / 'root'}; remove "
            f"{folder} and try again, or put a perf_analyzer on PATH"
        )
    return command


def _home() -> Path:
    return Path(os.environ.get("MASW_HOME") or "~/.cache/masw").expanduser()


def _glibc() -> str:
    return " ".join(platform.libc_ver()) or "an unknown C library"


def _runs(command: list[str]) -> bool:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _make(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a scratch folder and rename it to `target`, so that a half-made one is never used."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
        result = Path(scratch) / "result"
        result.mkdir()
        fill(result)
        if not target.exists():  # another process may have been quicker
            result.rename(target)


def _unpack_wheel(target: Path) -> None:
    tag = f"manylinux_2_38_{platform.machine()}"  # named, since pip refuses it on an older glibc
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    what = ["--only-binary=:all:", f"--platform={tag}", f"perf-analyzer=={VERSION}"]
    _run([*pip, *what, f"--dest={target}"], f"the perf-analyzer {VERSION} wheel ({tag})")
    wheel = next(target.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    wheel.unlink()
    (target / "perf_analyzer" / "bin" / "perf_analyzer").chmod(0o755)


def _unpack_libraries(target: Path) -> None:
    mirror = _mirror()
    with tempfile.TemporaryDirectory(prefix="masw-apt-") as scratch:
        apt = _private_apt(Path(scratch), mirror)
        _run([*apt, "update"], f"the package lists of Debian {RELEASE}")
        _run([*apt, "download", *PACKAGES], f"{', '.join(PACKAGES)} of {RELEASE}", cwd=scratch)
        for package in Path(scratch).glob("*.deb"):
            _run(["dpkg-deb", "-x", str(package), str(target)], package.name)


def _mirror() -> str:
    """The Debian mirror that this machine's own apt sources name."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise PerfAnalyzerError(
            f"perf_analyzer needs glibc 2.38; this machine has {_glibc()} and no apt-get to fetch "
            "a newer one privately. Put a perf_analyzer that runs on PATH"
        )
    listing = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(COMPONENT)"]
    lines = _run([*listing, "Created-By: Packages"], "this machine's apt sources").splitlines()
    for line in lines:
        uri, _, component = line.partition(" ")
        if component == "main" and re.search(r"/debian/?$", uri):
            return uri
    raise PerfAnalyzerError(
        "perf_analyzer needs glibc 2.38, and this machine's apt sources name no Debian mirror to "
        "fetch it from. Put a perf_analyzer that runs on PATH"
    )


def _private_apt(scratch: Path, mirror: str) -> list[str]:
    """apt-get with sources, lists, status and cache of its own in `scratch` and no hooks."""
    for name in ("lists", "archives"):
        (scratch / name / "partial").mkdir(parents=True)
    (scratch / "status").touch()
    signed = f"[signed-by={KEYRING}] " if Path(KEYRING).is_file() else ""
    (scratch / "sources.list").write_text(f"deb {signed}{mirror} {RELEASE} main\n")
    settings = {
        "Dir::Etc::sourcelist": scratch / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::Etc::preferencesparts": "-",
        "Dir::State": scratch,
        "Dir::State::lists": scratch / "lists",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch,
        "Dir::Cache::archives": scratch / "archives",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "",
    }
    hooks = [f"#clear APT::Update::{name};" for name in ("Post-Invoke", "Post-Invoke-Success")]
    lines = hooks + [f'{name} "{value}";' for name, value in settings.items()]
    (scratch / "apt.conf").write_text("\n".join(lines) + "\n")
    return ["apt-get", "--quiet", f"--config-file={scratch / 'apt.conf'}"]


def _run(command: list[str], what: str, cwd: str | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PerfAnalyzerError(f"cannot get {what}: {error}") from None
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise PerfAnalyzerError(f"cannot get {what}: {command[0]} failed with\n{tail}")
    return done.stdout


def _with_loader(binary: Path, root: Path) -> list[str]:
    loader = next(root.glob("usr/lib/*/ld-linux-*.so.*"), None)
    if loader is None:
        raise PerfAnalyzerError(f"{root} has no ld-linux loader; remove it and try again")
    start = [str(loader), "--library-path", str(loader.parent), "--argv0", "perf_analyzer"]
    return [*start, str(binary)]
