"""TensorRT-LLM's Python modules, imported when they are needed."""

from __future__ import annotations

import importlib
from types import ModuleType

CONTAINER = "tritonserver:26.04-trtllm-python-py3"


def load_executor() -> ModuleType:
    """`tensorrt_llm.bindings.executor`, which runs TensorRT engines.

    Raises ImportError naming the container where it is missing, or where TensorRT-LLM is of a
    version without TensorRT engines (1.3 and later).
    """
    module = load_trtllm("tensorrt_llm.bindings.executor")
    missing = [n for n in ("Executor", "ExternalDraftTokensConfig") if not hasattr(module, n)]
    if missing:
        raise ImportError(
            f"this TensorRT-LLM has no {', '.join(missing)}: it no longer runs TensorRT engines; "
            f"run in {CONTAINER}, or use its PyTorch backend with masw.engines.trtllm_drafter"
        )
    return module


def load_trtllm(name: str) -> ModuleType:
    """The module `name` of TensorRT-LLM; raises ImportError with the remedy."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        raise ImportError(
            f"{name} cannot be imported ({error}); run in the container {CONTAINER}, which has "
            "TensorRT-LLM 1.2"
        ) from error
