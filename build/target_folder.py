"""The folder of a TensorRT-LLM checkpoint: that it is what the plan says, and of which model.

config.json           what TensorRT-LLM builds
rank0.safetensors …   the tensors of every rank
provenance.json       where it came from
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..engines.engine_folder import file_sha256
from .calibration import Calibration
from .output_folder import PROVENANCE
from .target_plan import TargetPlan

CONFIG = "config.json"
# What ModelOpt may state otherwise: alone it has half-precision logits and no RoPE scaling; where
# TensorRT-LLM is installed, that library's own reading of the Hugging Face config.
CORRECTED = {
    "architecture",
    "logits_dtype",
    "qk_layernorm",
    "rotary_base",
    "rotary_scaling",
    "share_embedding_table",
    "tie_word_embeddings",
}
SAFETENSORS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
SAFETENSORS |= {"I8": "int8", "U8": "uint8"}
SAMPLED_PLACES, SAMPLED_BYTES = 64, 4096


class CheckpointError(RuntimeError):
    """ModelOpt failed, or a folder holds something other than what was planned; says what."""


def complete(written: dict[str, Any], planned: dict[str, Any]) -> dict[str, Any]:
    """ModelOpt's config with the plan's keys.

    Raises CheckpointError for a key that ModelOpt states otherwise and that is not one of
    `CORRECTED`: then the tensors are not those that were planned.
    """
    found = dict(written)
    for key, value in planned.items():
        stated = written.get(key, value)
        if isinstance(value, dict) and isinstance(stated, dict) and key not in CORRECTED:
            value, stated = {**stated, **value}, {**value, **stated}
        if stated != value and key not in CORRECTED:
            raise CheckpointError(f"ModelOpt wrote {key} {stated}; the plan has {value}")
        found[key] = value
    return found


def check_rank(plan: TargetPlan, folder: Path, rank: int) -> None:
    """Compares the header of a rank's file with the plan: names, dtypes, shapes.

    Raises CheckpointError naming the first tensor that is missing or different.
    """
    path = folder / f"rank{rank}.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{folder} lacks {path.name}")
    with _opened(path) as file:
        names = set(file.keys())
        for tensor in plan.shards.tensors(rank):
            if tensor.name not in names:
                raise CheckpointError(f"{path.name} lacks {tensor.name}")
            header = file.get_slice(tensor.name)
            found = SAFETENSORS.get(header.get_dtype()), tuple(header.get_shape())
            if found != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"{path.name}: {tensor.name} is {found[0]} {list(found[1])}, not "
                    f"{tensor.dtype} {list(tensor.shape)}"
                )


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from None


def check_checkpoint(
    plan: TargetPlan,
    folder: Path,
    model: Path | None = None,
    calibration: Calibration | None = None,
) -> None:
    """Raises CheckpointError where an existing checkpoint is not the plan's or the model's, or was
    calibrated on another text than the one that is given now."""
    config = _read(folder, CONFIG)
    for key, value in plan.config.items():
        if config.get(key) != value and not _within(value, config.get(key)):
            raise CheckpointError(
                f"{folder} has {key} {config.get(key)}, the recipe wants {value}; remove it to "
                "write it anew"
            )
    for rank in range(plan.target.ranks):
        check_rank(plan, folder, rank)
    recorded = _read(folder, PROVENANCE)
    known = model is not None and (model / CONFIG).is_file()
    if known and model_fingerprint(model) != recorded.get("model"):
        raise CheckpointError(f"{folder} was written from another model than {model}; remove it")
    if calibration is not None and calibration.as_dict() != recorded.get("calibration"):
        raise CheckpointError(
            f"{folder} was calibrated on another text or amount of it than {calibration.file}; "
            "remove it, or leave --calibration out"
        )


def _read(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of an existing checkpoint; raises CheckpointError where it is none."""
    try:
        found = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no whole checkpoint ({error}); remove it") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder} is no whole checkpoint ({name} is no object); remove it")
    return found


def _within(part: Any, whole: Any) -> bool:
    """Whether a mapping holds all of another."""
    both = isinstance(part, dict) and isinstance(whole, dict)
    return both and part == {key: whole[key] for key in part if key in whole}


def model_fingerprint(model: Path) -> dict[str, Any]:
    """What tells models apart without reading all weights: digests of config and of samples."""
    return {
        "config_sha256": file_sha256(model / CONFIG),
        "weights": {file.name: _sampled(file) for file in sorted(model.glob("*.safetensors"))},
    }


def _sampled(path: Path) -> str:
    """Digest of a file's size and of its bytes at evenly spaced places."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(SAMPLED_PLACES):
            file.seek(size * number // SAMPLED_PLACES)
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()
