"""The pair folder: links to where target, draft and adaptor lie, and what they have in common.

The links are relative, so that a root can move as a whole. They may dangle: a deployment can be
laid out before its engines are built; `missing_parts` names what is not there yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..engines.engine_folder import is_engine_folder
from ..engines.pair import Pair
from ..engines.places import Places
from ..engines.recipe import Recipe

TARGET, DRAFT, ADAPTOR = "target", "draft", "adaptor.safetensors"
PARTS = (TARGET, DRAFT, ADAPTOR)


def write_pair_folder(folder: Path, pair: Pair, parts: Mapping[str, Path]) -> None:
    """Writes pair.json and a link for each part, by its name in `PARTS`; replaces older links.

    Raises ValueError for a part that exists there as something else than a link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, place in parts.items():
        _link(folder / name, place)
    pair.save(folder)


def recipe_parts(places: Places) -> dict[str, Path]:
    """The parts of a gpu recipe: the draft is its engine, or its model where only that exists."""
    draft = places.draft_engine
    if not is_engine_folder(draft) and (places.draft_model / "config.json").is_file():
        draft = places.draft_model
    return {TARGET: places.target_model, DRAFT: draft, ADAPTOR: places.adaptor}


def write_recipe_pair(recipe: Recipe, places: Places) -> None:
    """Writes the pair folder of a gpu recipe below its root."""
    write_pair_folder(places.pair, Pair.of(recipe), recipe_parts(places))


def missing_parts(folder: Path) -> list[str]:
    """Names of the parts that are no files or folders, or links to none; a draft without slots
    needs no adaptor. Raises PairError for a damaged pair.json."""
    if not (folder / "pair.json").is_file():
        return ["pair.json"]
    needed = PARTS if Pair.load(folder).memory.interval else (TARGET, DRAFT)
    return [name for name in needed if not (folder / name).exists()]


def strayed_parts(folder: Path, parts: Mapping[str, Path]) -> list[str]:
    """Names of the parts that lead elsewhere than to these places."""
    return [name for name, place in parts.items() if (folder / name).resolve() != place.resolve()]


def _link(link: Path, place: Path) -> None:
    if link.exists() and not link.is_symlink():
        raise ValueError(f"{link} is no link; move it away, or lay the pair out elsewhere")
    target = os.path.relpath(place, link.parent)
    part = link.with_name(f".{link.name}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    os.replace(part, link)
