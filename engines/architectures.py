"""Architectures of published models by name, for plans and measurements without their weights."""

from __future__ import annotations

import importlib.resources
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .config import DecoderConfig

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


def architecture(name: str) -> DecoderConfig:
    """The architecture of this name. Raises ArchitectureError for an unknown one."""
    if name not in _known():
        raise ArchitectureError(f"architecture is {name!r}; known: {', '.join(names())}")
    return DecoderConfig.from_hf({k: v for k, v in _known()[name].items() if k != "source"})


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
    """The published model whose numbers these are. Raises ArchitectureError for an unknown name."""
    architecture(name)
    return _known()[name]["source"]
