"""What `masw-build repository` wrote: the pair folder and the model repository."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from google.protobuf import text_format

from ...engines.pair import Pair, PairError
from ...engines.recipe import Lane
from ..deployment import is_embedded, pair_folder, repository_config
from ..pair_folder import DRAFT, TARGET, missing_parts, recipe_parts, strayed_parts
from ..repository import RepositoryConfig, model_configs, read_model_config
from .finding import Finding, failed, ok, unknown
from .subject import Subject


def layout_findings(subject: Subject) -> list[Finding]:
    """The pair; for the gpu lane the repository too, which `masw-serve` writes for the other."""
    pair = _pair(subject)
    return [pair] if subject.recipe.lane == Lane.CPU else [pair, _repository(subject)]


def _pair(subject: Subject) -> Finding:
    name, folder = "pair", pair_folder(subject.recipe, subject.places)
    write = subject.command("repository")
    if not (folder / "pair.json").is_file():
        if is_embedded(subject.recipe):
            return unknown(name, f"{folder} is made by masw-serve on its first start")
        return failed(name, f"{folder} has no pair.json", f"write it: {write}")
    try:
        stated = Pair.load(folder)
    except PairError as error:
        return failed(name, str(error), f"write it again: {write}")
    if stated != Pair.of(subject.recipe):
        return failed(name, f"{folder} states {stated}", f"write it for this recipe: {write}")
    missing = missing_parts(folder)
    if missing:
        found = f"{folder} lacks {', '.join(missing)}"
        return failed(name, found, _remedy(subject, write))
    if folder == subject.places.pair and (strayed := strayed_parts(folder, _parts(subject))):
        found = f"{folder} leads to another {', '.join(strayed)} than there is by now"
        return failed(name, found, f"write it again: {write}")
    return ok(name, f"{folder} is whole")


def _remedy(subject: Subject, write: str) -> str:
    """How the parts of a pair come to be; on the gpu lane other findings name their commands."""
    if subject.recipe.lane == Lane.GPU:
        return "make what the lines about its parts name"
    places = subject.places
    models = f"put model folders at {places.target_model} and {places.draft_model}"
    return f"{models}, the adaptor at {places.adaptor}, then: {write}"


def _parts(subject: Subject) -> dict[str, Path]:
    """The parts that the pair must lead to; without slots the adaptor does not matter."""
    parts = recipe_parts(subject.places)
    return parts if subject.recipe.memory.interval else {k: parts[k] for k in (TARGET, DRAFT)}


def _repository(subject: Subject) -> Finding:
    """Whether every model's configuration is what the recipe says today, streaming or not."""
    name, folder = "repository", subject.places.repository
    config = repository_config(subject.recipe, subject.places)
    differing = _differing(folder, config)
    if not differing or not _differing(folder, replace(config, decoupled=not config.decoupled)):
        return ok(name, f"{folder}: all models as the recipe says")
    found = f"{folder}: {', '.join(differing)} absent or not as the recipe says"
    return failed(name, found, f"write it: {subject.command('repository')}")


def _differing(folder: Path, config: RepositoryConfig) -> list[str]:
    wanted = model_configs(config)
    return [model for model, message in wanted.items() if _written(folder, model) != message]


def _written(folder: Path, model: str) -> object:
    try:
        return read_model_config(folder / model / "config.pbtxt")
    except (OSError, text_format.ParseError):
        return None
