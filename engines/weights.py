"""The weights of a Hugging Face folder, as its index or its one file holds them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def read_weights(
    directory: Path, dtype: torch.dtype | None, device: torch.device | str
) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files under the decoder's own names."""
    files = _weight_files(directory)
    tensors = {}
    for path in files:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118
                if not name.endswith("rotary_emb.inv_freq"):
                    tensors[name.removeprefix("model.")] = file.get_tensor(name).to(dtype=dtype)
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    """The files that Hugging Face would read: those of the index, or model.safetensors."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [directory / name for name in sorted(names)]
    if not (directory / "model.safetensors").is_file():
        raise FileNotFoundError(f"{directory} has no model.safetensors and no index of several")
    return [directory / "model.safetensors"]
