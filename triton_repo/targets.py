"""The target port of a deployment: what its kind of target needs between the loop and Triton."""

from __future__ import annotations

from typing import Any

from ..engines.config import DecoderConfig
from ..engines.hostile_target import HOSTILE_PATIENCE, VOCAB_MULTIPLE
from ..engines.patience import Patience, PatientTarget
from ..engines.speculative import TargetPort
from ..engines.trtllm_calls import TrtllmCalls, TrtllmTarget, padded_vocab
from .ports import TargetModel


def target_port(pb_utils: Any, mode: str, target: DecoderConfig) -> TargetPort:
    """The port over `tensorrt_llm` in a target mode of the repository.

    The torch target is called as it is; the hostile one as TensorRT-LLM's C++ backend must be.
    """
    port: TargetPort = TargetModel(pb_utils, target.eos_ids, target.vocab_size)
    patience = Patience()
    if mode == "hostile":
        port = TrtllmTarget(port, TrtllmCalls(padded_vocab(target.vocab_size, VOCAB_MULTIPLE)))
        patience = HOSTILE_PATIENCE
    return PatientTarget(port, patience, pb_utils.Logger.log_warn)
