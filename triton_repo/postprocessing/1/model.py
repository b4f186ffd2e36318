"""postprocessing: cumulative ids to new text, for users of the ensemble; it keeps no state."""

from pathlib import Path

import torch
import triton_python_backend_utils as pb_utils

from masw.engines.text import TextCodec
from masw.triton_repo import wire


class TritonPythonModel:
    """Replays what earlier responses gave, then gives what is new."""

    def initialize(self, args):
        torch.set_num_threads(1)
        self.codec = TextCodec(Path(wire.settings(args).recipe) / "target")

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        piece = "" if wire.is_canary(request) else self._piece(wire.inputs(request))
        return wire.response(pb_utils, {"OUTPUT": wire.text(piece)})

    def _piece(self, values):
        ids = values["TOKENS_BATCH"][0, : values["SEQUENCE_LENGTH"][0]].tolist()
        emitted, final = int(values["EMITTED_LENGTH"][0]), bool(values["IS_FINAL"][0])
        stream = self.codec.stream([word.decode() for word in values["STOP_WORDS_DICT"]])
        stream.push(ids[:emitted])
        return stream.push(ids[emitted:], final)
