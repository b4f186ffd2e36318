"""The target port of a deployment: what its kind of target needs between the loop and Triton."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..engines.config import DecoderConfig
from ..engines.hostile_target import HOSTILE_PATIENCE
from ..engines.pair import Pair
from ..engines.patience import Patience, PatientTarget
from ..engines.speculative import TargetPort
from ..engines.trtllm_calls import AdaptedTarget, TrtllmCalls
from ..engines.trtllm_folder import AWQ_VOCAB_MULTIPLE, TargetEngine
from .ports import TargetModel


def target_engine(config: SimpleNamespace) -> TargetEngine | None:
    """The engine that TensorRT-LLM's backend serves, as it was built; None on the cpu lane."""
    return None if config.target is None else TargetEngine.load(Path(config.target["engine"]))


def loop_limits(engine: TargetEngine | None, pair: Pair) -> dict[str, Any]:
    """What the target changes in the settings of the loop.

    TensorRT-LLM cuts prompts into chunks itself, and computes beside the draft, not in its place.
    Raises EngineFolderError for an engine that is too small for the pair.
    """
    if engine is None:
        return {}
    engine.check_use(pair.max_length, pair.max_draft_tokens)
    return {"target_chunk": 0, "concurrent_prefill": True, "max_seq_len": engine.max_seq_len}


def target_port(
    pb_utils: Any, mode: str, target: DecoderConfig, engine: TargetEngine | None
) -> TargetPort:
    """The port over `tensorrt_llm` in a target mode of the repository.

    The torch target is called as it is, the hostile one as TensorRT-LLM's C++ backend.
    """
    if engine is not None:
        calls = TrtllmCalls(engine.vocab_size, engine.tensor_parallel)
        return trtllm_port(pb_utils, target, calls, Patience())
    if mode == "hostile":
        calls = TrtllmCalls(target.vocab_size, AWQ_VOCAB_MULTIPLE)
        return trtllm_port(pb_utils, target, calls, HOSTILE_PATIENCE)
    port = TargetModel(pb_utils, target.eos_ids, target.vocab_size)
    return PatientTarget(port, Patience(), pb_utils.Logger.log_warn)


def trtllm_port(
    pb_utils: Any, target: DecoderConfig, calls: TrtllmCalls, patience: Patience
) -> TargetPort:
    """The port over `tensorrt_llm` where that is, or behaves as, the C++ backend."""
    port = AdaptedTarget(TargetModel(pb_utils, None, target.vocab_size), calls)
    return PatientTarget(port, patience, pb_utils.Logger.log_warn)
