"""What a preflight is about: a recipe, its files, the machine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from ...engines.places import Places
from ...engines.recipe import Recipe
from .machine import Machine

MOST_GIB = 65_536  # of a device: more is a slip


@dataclass(frozen=True)
class Subject:
    """gpu_memory: GiB of each device, where the machine has none to ask."""

    recipe: Recipe
    places: Places
    machine: Machine
    gpu_memory: float | None = None
    recipe_name: str = ""

    def __post_init__(self):
        if self.gpu_memory is not None and not 0 < self.gpu_memory <= MOST_GIB:
            raise ValueError(
                f"gpu_memory is {self.gpu_memory}; give GiB above 0, at most {MOST_GIB}"
            )

    def command(self, name: str) -> str:
        """A command of `masw-build` for this recipe, as a shell takes it."""
        recipe = self.recipe_name or self.recipe.name
        what = ["--recipe", recipe] if name == "draft" else [recipe]
        return shlex.join(["masw-build", name, *what, "--root", str(self.places.root)])
