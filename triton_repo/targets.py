"""The target port of a deployment: what its kind of target needs between the loop and Triton."""

from __future__ import annotations

from typing import Any

from ..engines.config import DecoderConfig
from ..engines.hostile_target import HOSTILE_PATIENCE, VOCAB_MULTIPLE
from ..engines.patience import Patience, PatientTarget
from ..engines.speculative import TargetPort
from ..engines.trtllm_calls import AdaptedTarget, TrtllmCalls, padded_vocab
from .ports import TargetModel


def target_port(pb_utils: Any, mode: str, target: DecoderConfig) -> TargetPort:
    """The port over `tensorrt_llm` in a target mode of the repository.

    The torch target is called as it is, the hostile one as TensorRT-LLM's C++ backend.
    """
    if mode == "hostile":
        calls = TrtllmCalls(padded_vocab(target.vocab_size, VOCAB_MULTIPLE))
        return trtllm_port(pb_utils, target, calls, HOSTILE_PATIENCE)
    port = TargetModel(pb_utils, target.eos_ids, target.vocab_size)
    return PatientTarget(port, Patience(), pb_utils.Logger.log_warn)


def trtllm_port(
    pb_utils: Any, target: DecoderConfig, calls: TrtllmCalls, patience: Patience
) -> TargetPort:
    """The port over `tensorrt_llm` where that is, or behaves as, the C++ backend."""
    port = AdaptedTarget(TargetModel(pb_utils, None, target.vocab_size), calls)
    return PatientTarget(port, patience, pb_utils.Logger.log_warn)
