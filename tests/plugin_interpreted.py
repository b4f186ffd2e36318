"""Runs the plugins' kernels as `plugin_launches` wrote them down, in Triton's interpreter.

`TRITON_INTERPRET=1 python -m tests.plugin_interpreted FOLDER`: tensors in the plugins' layouts and
types, and their grids, scalars and tactics, against the dense oracle.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch

from masw.plugins.slot_attention import aot
from masw.plugins.slot_attention.kernels import dense_partial_kernel, merge_kernel
from tests.kernel_cases import Case
from tests.plugin_launches import DRAFTS, Draft

NAME = "small"
# Fed lengths and new raw tokens: blocks of the profiles' shapes, with slots and padding.
BLOCKS = {"decode": ((354, 48, 0), (1, 1, 1)), "chunk": ((100, 0), (17, 3))}


def case_of(draft: Draft, profile: str) -> Case:
    """The case of a profile's usual shape."""
    fed, new = BLOCKS[profile]
    return Case(draft.rule, torch.float32, draft.head_dim, draft.heads, draft.kv_heads, fed, new)


def check(draft: Draft, profile: str, found: dict) -> int:
    """Compares every tactic with the oracle; returns how many there are."""
    inputs = case_of(draft, profile).on("cpu")
    attention = aot.Attention(**draft.shape, dtype=draft.dtype, rule=draft.rule)
    first, second = found["partial"][profile], found["merge"][profile]
    for tactic, launch in first["tactics"].items():
        partial, lse = (torch.full(shape, math.nan) for shape in first["shapes"])
        constants = aot.partial_constants(attention, aot.plans(attention)[int(tactic) - 1])
        arguments = (*inputs.contiguous, *launch["scalars"], partial, lse)
        dense_partial_kernel[tuple(launch["grid"])](*arguments, **constants)
        out = torch.full(second["shapes"][0], math.nan)
        (merge,) = second["tactics"].values()
        constants = aot.merge_constants(draft.head_dim, draft.most_parts)
        merge_kernel[tuple(merge["grid"])](partial, lse, *merge["scalars"], out, **constants)
        inputs.check(out.transpose(1, 2))
    return len(first["tactics"])


def main(folder: Path) -> None:
    """Checks the small draft in each of its profiles."""
    found = json.loads((folder / "launches.json").read_text())[NAME]
    for profile in BLOCKS:
        print(profile, check(DRAFTS[NAME], profile, found), "tactics equal the oracle")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
