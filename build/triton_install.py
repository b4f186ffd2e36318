"""Where the Triton server of this machine is, made ready for the running Python.

The `nvidia-pytriton` wheel carries a genuine server and one stub per Python version; a backend
folder with the right stub is assembled once under the masw home. Without the wheel a system
server under /opt/tritonserver is taken as it is.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

SYSTEM_ROOT = Path("/opt/tritonserver")
STUB = "triton_python_backend_stub"


class ServerError(RuntimeError):
    """The server could not be found, started or asked; the message says what to do."""


class NoAnswer(ServerError):
    """The server did not answer in time, or not at all."""


def masw_home() -> Path:
    """Folder of prepared files: $MASW_HOME, else ~/.cache/masw."""
    return Path(os.environ.get("MASW_HOME") or "~/.cache/masw").expanduser()


@dataclass(frozen=True)
class Installation:
    """The files of one Triton server on this machine."""

    binary: Path
    backends: Path
    caches: Path
    libraries: tuple[Path, ...]


def find_installation(home: Path | None = None) -> Installation:
    """The wheel's server with a backend folder for the running Python, else the system's.

    Raises ServerError naming the package to install when there is neither.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.origin is not None:
        return _from_wheel(Path(spec.origin).parent / "tritonserver", home or masw_home())
    if (SYSTEM_ROOT / "bin" / "tritonserver").is_file():
        root = SYSTEM_ROOT
        libraries = (root / "lib", *_python_library())
        return Installation(
            root / "bin" / "tritonserver", root / "backends", root / "caches", libraries
        )
    raise ServerError(
        f"no Triton server: neither the nvidia-pytriton package nor {SYSTEM_ROOT} is installed; "
        "run `pip install 'masw[cpu]'`"
    )


def _from_wheel(root: Path, home: Path) -> Installation:
    libraries = (*_python_library(), root.parent.parent / "nvidia_pytriton.libs")
    backends = _assemble_backends(root, home)
    return Installation(root / "bin" / "tritonserver", backends, root / "caches", libraries)


def _python_library() -> tuple[Path, ...]:
    """The folder of the running Python's shared library, which the models' processes load."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    folder = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for candidate in (folder, folder / multiarch, Path(sys.base_prefix) / "lib"):
        if ".so" in name and (candidate / name).is_file():
            return (candidate,)
    raise ServerError(
        f"{sys.base_prefix} has no shared libpython{sys.version_info[0]}.{sys.version_info[1]}, "
        "which Triton's Python models need; use a Python built with --enable-shared"
    )


def _assemble_backends(root: Path, home: Path) -> Path:
    """Copy the Python backend with the stub of the running Python's version into `home`."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = root / "python_backend_stubs" / version / STUB
    if not stub.is_file():
        known = sorted(path.name for path in stub.parent.parent.glob("3.*"))
        raise ServerError(f"Python {version}: the server has stubs for {known}; use one of them")
    library = root / "backends" / "python" / "libtriton_python.so"
    stamp = f"{library.stat().st_size:x}-{stub.stat().st_size:x}"
    target = home / "triton" / f"backends-{version}-{stamp}"
    if not (target / "python" / STUB).is_file():
        _copy_backend(library.parent, stub, target)
    return target


def _copy_backend(source: Path, stub: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".backends-") as scratch:
        folder = Path(scratch) / "backends" / "python"
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(stub, folder / STUB)
        (folder / STUB).chmod(0o755)
        if not target.exists():  # another server may have been quicker
            os.rename(folder.parent, target)
