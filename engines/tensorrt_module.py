"""The TensorRT module an engine is built or run with, imported when it is needed."""

from __future__ import annotations

import importlib
from types import ModuleType

REMEDIES = {
    "tensorrt": "run in NVIDIA's TensorRT-LLM container, which has it",
    "tensorrt_rtx": "pip install tensorrt-rtx",
}


def check_name(name: str) -> None:
    """Raises ValueError for what is no module of TensorRT."""
    if name not in REMEDIES:
        raise ValueError(f"TensorRT module is {name!r}; use one of {', '.join(REMEDIES)}")


def load_tensorrt(name: str) -> ModuleType:
    """The module `tensorrt` or `tensorrt_rtx`; raises ImportError with the remedy."""
    check_name(name)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is not installed: {REMEDIES[name]}") from error
