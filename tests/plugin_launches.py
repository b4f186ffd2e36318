"""Drives the TensorRT plugins and writes down what they would have TensorRT launch.

Run as a program of its own, `python -m tests.plugin_launches FOLDER [DRAFT ...]`, where `tensorrt`
is the plugin sources of its wheel on `tests/tensorrt_double.py`. Writes FOLDER/launches.json, and a
PTX file for every kernel.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from masw.plugins.slot_attention.rule import MemoryRule


@dataclass(frozen=True)
class Draft:
    """One slot-attention layer of a network, as the tests sample them."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    rule: MemoryRule
    sm: int
    programs: int
    most_parts: int = 64
    shared_limit: int = 48 * 1024

    @property
    def shape(self) -> dict[str, int]:
        """Heads and their size."""
        return {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}


# The default memory and a GPU of 132 multiprocessors; other types, sizes, rules and targets. The
# last is small enough for the interpreter, with several tiles, parts and key heads.
MATERIALIZED = MemoryRule(4, 70, 8, 4, "materialized")
DRAFTS = {
    "llama-3.2-3b": Draft("bf16", 24, 8, 128, MemoryRule(), 90, 264),
    "llama-3.2-1b": Draft("fp16", 32, 8, 64, MATERIALIZED, 80, 216, 64, 160 * 1024),
    "small": Draft("fp32", 6, 2, 64, MemoryRule(16, 33, 16, 3), 120, 24, 5),
}
# Batch, positions and entries that vary in a profile: least, usual and greatest.
DECODE = ((1, 2, 4500), (1, 2, 4500), (32, 4, 4500))
WIDE = ((1, 2, 4500), (8, 4, 4500), (32, 4, 4500))
FULL = ((32, 2, 4500), (32, 2, 4500), (32, 4, 4500))
CHUNK = ((1, 1, 4500), (1, 576, 4500), (2, 576, 4500))
SHORT = ((1, 1, 1), (1, 2, 126), (1, 2, 200))
TINY = ((1, 1, 1), (3, 2, 273), (8, 64, 900))
TINY_CHUNK = ((1, 1, 1), (2, 22, 273), (8, 64, 900))
PROFILES = {
    "llama-3.2-3b": {"decode": DECODE, "wide": WIDE, "full": FULL, "chunk": CHUNK, "short": SHORT},
    "llama-3.2-1b": {"decode": DECODE, "chunk": CHUNK},
    "small": {"decode": TINY, "chunk": TINY_CHUNK},
}


def network_of(draft: Draft) -> tuple:
    """A network of one layer, and its output."""
    import tensorrt as trt

    from masw.plugins.slot_attention import tensorrt as plugin

    network = trt.INetworkDefinition()
    device = plugin.Device(draft.sm, draft.programs, draft.most_parts, draft.shared_limit)
    return network, plugin.add_slot_attention(network, _inputs(network, draft), draft.rule, device)


def record(draft: Draft, profiles: dict, folder: Path) -> dict:
    """Launches of both plugins of a draft in every profile, by plugin, profile and tactic."""
    import tensorrt as trt

    from masw.plugins.slot_attention import aot

    attention = aot.Attention(**draft.shape, dtype=draft.dtype, rule=draft.rule)
    network, out = network_of(draft)
    found = {
        "attributes": [layer.plugin.attrs for layer in network.layers],
        "plans": [asdict(plan) for plan in aot.plans(attention)],
        "out_type": out.dtype.name,
    }
    for name, layer in zip(("partial", "merge"), network.layers, strict=True):
        found[name] = {}
        for label, sizes in profiles.items():
            profile = tuple(dict(zip("BNM", x, strict=True)) for x in sizes)
            tactics = trt.launches(layer, profile)
            shapes = [x.dims(profile[1]) for x in layer.outputs]
            types = [x.dtype.name for x in layer.outputs]
            for launch in tactics.values():
                launch["ptx"] = _save(folder, launch["name"], draft.sm, launch["ptx"])
            found[name][label] = {"shapes": shapes, "types": types, "tactics": tactics}
    return found


def refusals(draft: Draft) -> dict[str, str]:
    """What the plugins say to networks that they cannot serve, by the field that is wrong."""
    wrong = {
        "heads": replace(draft, heads=7),
        "head_dim": replace(draft, head_dim=320),
        "q": replace(draft, dtype="int8"),
        "sm": replace(draft, sm=75),
        "programs": replace(draft, programs=0),
        "shared_limit": replace(draft, shared_limit=1024),
    }
    return {field: _refusal(one) for field, one in wrong.items()}


def _refusal(draft: Draft) -> str:
    import tensorrt as trt

    try:
        network, _ = network_of(draft)
        trt.launches(network.layers[0], ({"B": 1, "N": 2, "M": 90},) * 3)
    except ValueError as error:
        return str(error)
    return "accepted"


def _inputs(network, draft: Draft) -> tuple:
    """q, k_new, v_new, memory_k, memory_v, rows, fed, times, kind."""
    import tensorrt as trt

    kind = {"fp16": trt.float16, "bf16": trt.bfloat16, "fp32": trt.float32, "int8": trt.int8}[
        draft.dtype
    ]
    query = ("B", draft.heads, "N", draft.head_dim)
    new = ("B", draft.kv_heads, "N", draft.head_dim)
    memory = (40, draft.kv_heads, "M", draft.head_dim)
    values = [network.add_input(kind, shape) for shape in (query, new, new, memory, memory)]
    shapes = (("B",), ("B",), ("B", "N"), ("B", "N"))
    return *values, *(network.add_input(trt.int32, shape) for shape in shapes)


def _save(folder: Path, name: str, sm: int, ptx: str) -> str:
    """Name of the file that holds a PTX; the same PTX is kept once."""
    path = folder / f"{name}.sm_{sm}.{hashlib.sha256(ptx.encode()).hexdigest()[:12]}.ptx"
    path.write_text(ptx)
    return path.name


def other_targets(folder: Path) -> None:
    """Kernels of the targets that no draft above is for, compiled without TensorRT's interface."""
    from masw.plugins.slot_attention import aot

    sampled = {draft.sm for draft in DRAFTS.values()}
    for sm in set(aot.TARGETS) - sampled:
        dtype = "fp16" if sm == 86 else "bf16"
        attention = aot.Attention(6, 2, 128, dtype, MemoryRule.windowed(4, 70))
        for kernel in (
            aot.compile_partial(attention, aot.plans(attention)[-1], sm),
            aot.compile_merge(96, dtype, 16, sm),
        ):
            _save(folder, kernel.name, sm, kernel.ptx)


def main(folder: Path, names: list[str]) -> None:
    """Writes everything, or only what belongs to the drafts of these names."""
    found = {name: record(DRAFTS[name], PROFILES[name], folder) for name in names or DRAFTS}
    if not names:
        other_targets(folder)
        found["refusals"] = refusals(DRAFTS["small"])
    (folder / "launches.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
