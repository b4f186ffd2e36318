"""tensorrt_llm on the cpu lane: the torch target with the tensors of TensorRT-LLM's C++ backend."""

from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from masw.engines.hostile_target import load_hostile_target
from masw.engines.messages import InvalidRequest
from masw.engines.pair import load_target
from masw.triton_repo import wire
from masw.triton_repo.cores import Cores
from masw.triton_repo.ports import target_call


class TritonPythonModel:
    """A thin shell over the target engine of the pair."""

    def initialize(self, args):
        config = wire.settings(args)
        if config.engine_threads:
            torch.set_num_threads(config.engine_threads)
        self.cores = Cores(Path(args["model_repository"]).parent)
        self.hostile = config.target_mode == "hostile"
        load = load_hostile_target if self.hostile else load_target
        self.target = load(Path(config.recipe), config.max_sequences)

    def execute(self, requests):
        responses, places, calls, excluded = [None] * len(requests), [], [], []
        for place, request in enumerate(requests):
            if wire.is_canary(request):
                responses[place] = self._verdict(())
                continue
            values = wire.inputs(request)
            try:
                calls.append(target_call(values))
            except InvalidRequest as error:
                responses[place] = wire.failure(pb_utils, error)
                continue
            places.append(place)
            excluded.append(values.get("exclude_input_in_output", [True])[0])
        with self.cores:
            answers = self.target.verify(calls)
        for place, *answered in zip(places, calls, excluded, answers, strict=True):
            responses[place] = self._respond(*answered)
        return responses

    def _respond(self, call, excluded, answer):
        if isinstance(answer, Exception):
            return wire.failure(pb_utils, answer)
        if self.hostile:
            return self._verdict(*self.target.lay_out(call.ids, answer.ids))
        return self._verdict(answer.ids if excluded else (*call.ids.tolist(), *answer.ids))

    def _verdict(self, ids, length=None):
        outputs = {
            "output_ids": np.array([[ids]], np.int32),
            "sequence_length": np.array([[len(ids) if length is None else length]], np.int32),
        }
        return wire.response(pb_utils, outputs)
