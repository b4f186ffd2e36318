"""tensorrt_llm on the cpu lane: the torch target with the tensors of TensorRT-LLM's C++ backend."""

from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

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
        self.target = load_target(Path(config.recipe), config.max_sequences)

    def execute(self, requests):
        responses, places, calls, prompts = [None] * len(requests), [], [], []
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
            excluded = values.get("exclude_input_in_output", [True])[0]
            prompts.append(() if excluded else values["input_ids"].tolist())
        with self.cores:
            answers = self.target.verify(calls)
        for place, prompt, answer in zip(places, prompts, answers, strict=True):
            responses[place] = self._respond(prompt, answer)
        return responses

    def _respond(self, prompt, answer):
        if isinstance(answer, Exception):
            return wire.failure(pb_utils, answer)
        return self._verdict((*prompt, *answer.ids))

    def _verdict(self, ids):
        outputs = {
            "output_ids": np.array([[ids]], np.int32),
            "sequence_length": np.array([[len(ids)]], np.int32),
        }
        return wire.response(pb_utils, outputs)
