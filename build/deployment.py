"""A recipe laid out for Triton: its pair folder and its model repository."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..engines.pair import Pair
from ..engines.places import Places
from ..engines.recipe import Lane, Recipe, RecipeError, load_recipe
from ..engines.recipes import EMBEDDED
from ..engines.trtllm_folder import is_target_engine
from .pair_folder import missing_parts, write_recipe_pair
from .repository import RepositoryConfig, write_repository


@dataclass(frozen=True)
class Layout:
    """What was written. missing: files the repository refers to that are not there yet."""

    repository: Path
    pair: Path
    changed: tuple[Path, ...]
    missing: tuple[Path, ...]


def is_embedded(recipe: Recipe) -> bool:
    """Whether this is the pair that needs no files of its own; limits of serving may differ."""
    shipped = load_recipe(EMBEDDED)
    if (recipe.lane, recipe.name, recipe.package) != (shipped.lane, shipped.name, shipped.package):
        return False
    pair = Pair.of(shipped)
    mine = replace(Pair.of(recipe), draft_tokens=pair.draft_tokens)  # the repository has its own
    return mine == pair


def check_name(recipe: Recipe) -> None:
    """Refuses another pair on the cpu lane that has the name of the embedded one."""
    if recipe.lane == Lane.CPU and recipe.name == EMBEDDED and not is_embedded(recipe):
        raise RecipeError(
            f"name is {EMBEDDED!r}, but the recipe states another pair than the shipped one; "
            "give it a name of its own"
        )


def pair_folder(recipe: Recipe, places: Places) -> Path:
    """Where the models of a recipe find their pair."""
    if is_embedded(recipe):
        from .embedded_pair import pair_place

        return pair_place(recipe)
    return places.pair


def repository_config(recipe: Recipe, places: Places) -> RepositoryConfig:
    """The configuration of a recipe's repository."""
    return RepositoryConfig.of(recipe, pair_folder(recipe, places), places)


def lay_out(
    recipe: Recipe, places: Places, out: Path | None = None, decoupled: bool | None = None
) -> Layout:
    """Writes the repository to `out` (the recipe's place when None), and the pair.

    decoupled: instead of the recipe's own. The embedded pair is prepared if it is not yet. Raises
    RecipeError for another recipe of its name, ValueError where `out` is no folder.
    """
    check_name(recipe)
    out = out or places.repository
    if out.exists() and not out.is_dir():
        raise ValueError(f"out is {out}, which is no folder; give another")
    config = repository_config(recipe, places)
    if decoupled is not None:
        config = replace(config, decoupled=decoupled)
    if is_embedded(recipe):
        from .embedded_pair import prepare_embedded_pair

        prepare_embedded_pair()
    else:
        write_recipe_pair(recipe, places)
    changed = write_repository(config, out)
    return Layout(out, Path(config.recipe), tuple(changed), _missing(config))


def _missing(config: RepositoryConfig) -> tuple[Path, ...]:
    pair = Path(config.recipe)
    missing = [pair / name for name in missing_parts(pair)]
    if config.target is not None and not is_target_engine(Path(config.target.engine)):
        missing.append(Path(config.target.engine))
    return tuple(missing)
