"""The draft's adaptor and its engine against the recipe and the GPU."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import replace
from pathlib import Path

from ...engines.adaptor import AdaptorError, check_adaptor
from ...engines.engine_folder import DraftEngine, EngineFolderError, is_engine_folder
from ...engines.pair import Pair, load_engine
from ..pair_folder import recipe_parts, write_pair_folder
from .finding import Finding, failed, judged, ok, unknown
from .subject import Subject


def draft_findings(subject: Subject) -> list[Finding]:
    """Adaptor and engine; the engine alone where the recipe has no slots."""
    engine = [*_engine(subject)]
    return [_adaptor(subject), *engine] if subject.recipe.memory.interval else engine


def _adaptor(subject: Subject) -> Finding:
    """Made for the draft's architecture and the recipe's memory; its base is the engine's check."""
    name, recipe, path = "adaptor", subject.recipe, subject.places.adaptor
    train = f"train it ({train_command(subject)}) and copy the run's adaptor to {path}"
    if not path.is_file():
        return failed(name, f"{path} does not exist", train)
    try:
        config = check_adaptor(path, recipe.draft_config())
    except AdaptorError as error:
        return failed(name, str(error), train)
    made_for = config.rule(recipe.memory.rollback)
    found = f"{'trained' if config.trained else 'untrained'}, made for {made_for}"
    found += "" if made_for == recipe.memory else f"; the recipe has {recipe.memory}"
    remedy = f"change memory in the recipe to the adaptor's, or {train}"
    return judged(name, made_for == recipe.memory, found, remedy)


def train_command(subject: Subject) -> str:
    """The command that begins an adaptor for the recipe's draft and memory; see docs/adaptor.md."""
    memory, places = subject.recipe.memory, subject.places
    options = {
        "model": places.draft_model,
        "sink": memory.sink,
        "window": memory.window,
        "intervals": memory.interval,
        "visibility": memory.visibility,
        "device": "cuda",
        "data": "NAME=DOCUMENTS",
        "out": "RUN",
    }
    words = ["masw-train", "pretrain"]
    return shlex.join([*words, *(str(w) for k, v in options.items() for w in (f"--{k}", v))])


def _engine(subject: Subject) -> list[Finding]:
    folder, build = subject.places.draft_engine, subject.command("draft")
    if not is_engine_folder(folder):
        return [failed("draft engine", f"{folder} holds none", f"build it: {build}")]
    try:
        engine = _load(subject)
    except ValueError as error:
        return [failed("draft engine", str(error), f"make the parts fit, or {_again(subject)}")]
    return [_numbers(subject, engine), _device(subject, engine)]


def _again(subject: Subject) -> str:
    """How to rebuild; a finished engine is in the way of the new one."""
    return f"remove {subject.places.draft_engine}, then build: {subject.command('draft')}"


def _load(subject: Subject) -> DraftEngine:
    """The engine, checked against the pair as the served model checks it."""
    recipe, places = subject.recipe, subject.places
    with tempfile.TemporaryDirectory() as scratch:
        parts = {name: place.absolute() for name, place in recipe_parts(places).items()}
        write_pair_folder(Path(scratch), Pair.of(recipe), parts)
        return load_engine(Path(scratch), recipe.memory, recipe.limits.max_sequences)


def _numbers(subject: Subject, engine: DraftEngine) -> Finding:
    name, draft = "draft engine", subject.recipe.draft
    wanted = replace(subject.recipe.draft_config(), eos_ids=engine.model.eos_ids)
    found = f"{engine.io.dtype}, {engine.io.max_sequences} sequences of {engine.io.max_length}"
    if engine.model != wanted:
        remedy = f"change draft.architecture, or {_again(subject)}"
        return failed(name, f"the engine's model is not {draft.architecture}", remedy)
    found += f", R {engine.io.rule.rollback}; draft.dtype is {draft.dtype}"
    remedy = f"set draft.dtype to {engine.io.dtype}, or {_again(subject)}"
    return judged(name, engine.io.dtype == draft.dtype, found, remedy)


def _device(subject: Subject, engine: DraftEngine) -> Finding:
    """Built by this TensorRT, for this kind of GPU."""
    name, builder, machine = "draft engine: device", engine.builder, subject.machine
    made = f"built by {builder.module} {builder.version}"
    made += f" for compute capability {builder.compute_capability or 'of any GPU'}"
    gpu = machine.gpu(subject.recipe.draft.gpu)
    if gpu is None:
        return unknown(name, f"{made}; no such GPU here to compare")
    if builder.module != "tensorrt":
        return failed(name, f"{made}; the server has tensorrt", _again(subject))
    version = machine.versions.get("tensorrt")
    try:
        engine.check_use(version=version, compute_capability=gpu.compute_capability)
    except EngineFolderError as error:
        return failed(name, str(error), f"on this machine: {_again(subject)}")
    return ok(name, f"{made}, as here")
