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
    report, vocab = pb_utils.Logger.log_warn, target.vocab_size
    if mode == "hostile":
        calls = TrtllmCalls(padded_vocab(vocab, VOCAB_MULTIPLE))
        port = TrtllmTarget(TargetModel(pb_utils, None, vocab), calls)
        return PatientTarget(port, HOSTILE_PATIENCE, report)
    return PatientTarget(TargetModel(pb_utils, target.eos_ids, vocab), Patience(), report)
