"""Architectures of published models by name, for plans and measurements without their weights."""

from __future__ import annotations

import importlib.resources
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .config import DecoderConfig, UnsupportedModelError, read_config

FILE = "architectures.yaml"


class ArchitectureError(ValueError):
    """An unknown architecture, or a model folder that is another one than it is said to be."""


@cache
def _known() -> dict[str, dict[str, Any]]:
    text = importlib.resources.files(f"{__package__}.recipes").joinpath(FILE)
    return yaml.safe_load(text.read_text())


def names() -> tuple[str, ...]:
    """Names of the known architectures."""
    return tuple(_known())


def architecture(name: str | None) -> DecoderConfig:
    """The architecture of this name, or of the config.json whose path the name is.

    Raises ArchitectureError for an unknown one, UnsupportedModelError for one that no engine
    here runs.
    """
    return DecoderConfig.from_hf({k: v for k, v in _numbers(name).items() if k != "source"})


def _numbers(name: str | None) -> dict[str, Any]:
    if name is not None and name.endswith(".json"):
        return _read(Path(name))
    if name not in _known():
        raise ArchitectureError(
            f"architecture is {name!r}; known: {', '.join(names())}, or the path of a config.json"
        )
    return _known()[name]


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_config(path)
    except (OSError, UnsupportedModelError) as error:
        raise ArchitectureError(f"architecture is {str(path)!r}: {error}") from None


def check_model_folder(folder: Path) -> None:
    """Raises ArchitectureError where a Hugging Face folder is none."""
    if not (folder / "config.json").is_file():
        raise ArchitectureError(f"{folder} is no model folder: it has no config.json")


def check_folder(name: str, folder: Path) -> DecoderConfig:
    """The config of a model folder that must be of this architecture.

    Raises ArchitectureError naming the first number that differs from the recipe.
    """
    wanted, found = architecture(name), DecoderConfig.load(folder)
    for field in fields(DecoderConfig):
        expected, real = getattr(wanted, field.name), getattr(found, field.name)
        if expected != real and field.name != "eos_ids":
            raise ArchitectureError(
                f"{folder.name}: {field.name} is {real}, but {name} has {expected}; "
                "give the folder of that model, or its own architecture"
            )
    return found


def source(name: str) -> str:
    """The published model whose numbers these are, as far as a config.json of one's own tells.

    Raises ArchitectureError for an unknown name.
    """
    numbers = _numbers(name)
    return numbers.get("source") or numbers.get("_name_or_path") or "MODEL"
