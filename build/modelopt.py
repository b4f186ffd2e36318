"""NVIDIA ModelOpt, which quantises the Hugging Face models of target and draft.

Works with ModelOpt 0.37 (settings as mappings; TensorRT-LLM 1.2 has it) and 0.47 (as lists). 0.37
needs a GPU for NVFP4, and TensorRT-LLM beside it for Qwen models; 0.47 needs neither.
"""

from __future__ import annotations

import copy
import importlib
import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from types import ModuleType
from typing import Any

import torch

FORMATS = {"fp8": "FP8_DEFAULT_CFG", "int4_awq": "INT4_AWQ_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}
CACHE = "FP8_KV_CFG"


def modelopt(part: str) -> ModuleType:
    """`modelopt.torch.<part>`; raises ImportError with the remedy."""
    try:
        return importlib.import_module(f"modelopt.torch.{part}")
    except ImportError as error:
        raise ImportError(
            f"ModelOpt cannot be imported ({error}); pip install 'masw[gpu]', or run in NVIDIA's "
            "TensorRT-LLM container, which has it"
        ) from error


def check_modelopt() -> None:
    """Imports ModelOpt without what it prints then; raises ImportError with the remedy."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        modelopt("export")


def settings(mtq: ModuleType, quantization: str, kv_cache: str) -> dict[str, Any]:
    """ModelOpt's settings for a recipe's weights and cache, in the form its version uses."""
    found = copy.deepcopy(getattr(mtq, FORMATS[quantization]))
    if kv_cache == "fp8":
        entries, cache = found["quant_cfg"], copy.deepcopy(getattr(mtq, CACHE)["quant_cfg"])
        older = isinstance(entries, dict)
        found["quant_cfg"] = {**entries, **cache} if older else [*entries, *cache]
    return found


def quantize(
    model: torch.nn.Module,
    quantization: str,
    kv_cache: str,
    sequences: Sequence[Sequence[int]],
    tick: Callable[[int], None],
) -> torch.nn.Module:
    """The model with ModelOpt's quantisers, their scales measured on `sequences` of ids.

    quantization, kv_cache: the recipe's words, other than "none" and one of "auto" and "fp8".
    tick(n) is called after the nth forward pass; AWQ makes two over all sequences.
    """
    mtq = modelopt("quantization")
    done = 0

    def forward_loop(calibrated: torch.nn.Module) -> None:
        nonlocal done
        device = next(calibrated.parameters()).device
        for ids in sequences:
            with torch.no_grad():
                calibrated(torch.tensor([ids], device=device))  # (1, T)
            done += 1
            tick(done)

    return mtq.quantize(model, settings(mtq, quantization, kv_cache), forward_loop=forward_loop)
