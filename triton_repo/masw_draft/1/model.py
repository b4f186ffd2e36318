"""masw_draft: proposes tokens for many sequences, one call each per iteration."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from masw.engines.messages import DraftStateError
from masw.engines.pair import DraftMode, load_draft
from masw.triton_repo import wire
from masw.triton_repo.cores import Cores
from masw.triton_repo.ports import draft_call


class TritonPythonModel:
    """A thin shell over the draft engine of the pair; in mode none it proposes nothing."""

    def initialize(self, args):
        config = wire.settings(args)
        if config.engine_threads:
            torch.set_num_threads(config.engine_threads)
        device = self._device(args)
        self.turn = nullcontext()  # on a GPU nobody else waits for the cores
        if device == "cpu":
            self.turn = Cores(Path(args["model_repository"]).parent)
        self.draft = None
        if config.draft_mode != DraftMode.NONE:
            self.draft = load_draft(
                Path(config.recipe),
                config.draft_mode,
                config.max_sequences,
                device=device,
            )

    def _device(self, args):
        """The device of the model's instance group, made the current one."""
        if args["model_instance_kind"] != "GPU":
            return "cpu"
        device = torch.device("cuda", int(args["model_instance_device_id"]))
        torch.cuda.set_device(device)
        return device

    def execute(self, requests):
        responses = [self._proposal((), None)] * len(requests)
        places, calls = [], []
        for place, request in enumerate(requests):
            if self.draft is None or wire.is_canary(request):
                continue
            places.append(place)
            calls.append(draft_call(wire.inputs(request)))
        for place, answer in zip(places, self._propose(calls), strict=True):
            responses[place] = self._respond(answer)
        return responses

    def _propose(self, calls):
        if not calls:  # canaries only
            return []
        with self.turn:
            return self.draft.propose(calls)

    def _respond(self, answer):
        if isinstance(answer, DraftStateError):
            answer = DraftStateError(wire.DRAFT_STATE + str(answer))
        if isinstance(answer, Exception):
            return wire.failure(pb_utils, answer)
        return self._proposal(answer.ids, answer.logits)

    def _proposal(self, ids, logits):
        empty = np.empty((1, 0, 0), np.float32)
        outputs = {
            "draft_input_ids": wire.batched(ids, np.int32),
            "draft_logits": empty if logits is None else logits.cpu().numpy()[None],
        }
        return wire.response(pb_utils, outputs)
