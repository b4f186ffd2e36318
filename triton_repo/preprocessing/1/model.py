"""preprocessing: text to ids, for users of the ensemble."""

from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from masw.engines.messages import InvalidRequest
from masw.engines.text import TextCodec
from masw.triton_repo import wire
from masw.triton_repo.generation import text_of


class TritonPythonModel:
    """The tokenizer of the pair's target."""

    def initialize(self, args):
        torch.set_num_threads(1)
        self.codec = TextCodec(Path(wire.settings(args).recipe) / "target")

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            ids = () if wire.is_canary(request) else self._ids(wire.inputs(request))
        except InvalidRequest as error:
            return wire.failure(pb_utils, error)
        outputs = {
            "INPUT_ID": wire.batched(ids, np.int32),
            "REQUEST_INPUT_LEN": wire.batched(len(ids), np.int32),
        }
        return wire.response(pb_utils, outputs)

    def _ids(self, values):
        template = bool(values.get("APPLY_CHAT_TEMPLATE", [False])[0])
        return self.codec.encode(text_of({"text_input": values["QUERY"]}, "text_input"), template)
