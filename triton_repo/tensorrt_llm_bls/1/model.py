"""tensorrt_llm_bls: the endpoint for people, one coroutine per request on one event loop."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import torch
import triton_python_backend_utils as pb_utils

from masw.engines.config import DecoderConfig
from masw.engines.messages import InvalidRequest
from masw.engines.pair import Pair
from masw.engines.speculative import SpeculativeLoop
from masw.engines.text import TextCodec
from masw.triton_repo import wire
from masw.triton_repo.metrics import Metrics
from masw.triton_repo.ports import DraftModel
from masw.triton_repo.service import Service, ServiceLimits
from masw.triton_repo.targets import loop_limits, target_engine, target_port

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """A thin shell over `Service`. An error never leaves `execute`, and FINAL is always sent:
    either would hang the client for ever."""

    def initialize(self, args):
        torch.set_num_threads(1)
        config = wire.settings(args)
        self.decoupled = config.decoupled
        pair, folder = Pair.load(Path(config.recipe)), Path(config.recipe)
        target = DecoderConfig.load(folder / "target")
        engine = target_engine(config)
        settings = pair.loop_settings(
            config.draft_mode, draft_tokens=config.draft_tokens, **loop_limits(engine, pair)
        )
        port = target_port(pb_utils, config.target_mode, target, engine)
        draft = None if config.draft_mode == "none" else DraftModel(pb_utils)
        self.service = Service(
            SpeculativeLoop(port, draft, settings),
            TextCodec(folder / "target"),
            Metrics(pb_utils, settings.max_draft_tokens),
            ServiceLimits(config.max_sequences, config.max_waiting, config.time_limit),
            target.vocab_size,
            target.eos_ids,
        )

    async def execute(self, requests):
        if self.decoupled:
            await asyncio.gather(*(self._stream(request) for request in requests))
            return None
        return await asyncio.gather(*(self._answer(request) for request in requests))

    async def _stream(self, request):
        """Answers over the request's own sender, as often as it wants."""
        sender = request.get_response_sender()
        try:
            ended = not wire.is_canary(request) and await self._send_replies(request, sender)
            if not ended:
                sender.send(flags=FINAL)
        except Exception as error:
            sender.send(self._failure(error), flags=FINAL)

    async def _send_replies(self, request, sender):
        """Whether the final reply was sent; a cancelled request has none."""
        replies = self.service.serve(wire.inputs(request), request.is_cancelled)
        async with aclosing(replies):
            async for reply in replies:
                flags = FINAL if reply.final else 0
                sender.send(wire.response(pb_utils, reply.outputs), flags=flags)
                if reply.final:
                    return True
        return False

    async def _answer(self, request):
        """Exactly one response, for a repository that does not stream."""
        try:
            if wire.is_canary(request):
                return wire.response(pb_utils, {"text_output": wire.text("")})
            values = wire.inputs(request)
            if values.pop("stream", [False])[0]:
                raise InvalidRequest("stream is true; this repository is not decoupled")
            replies = [reply async for reply in self.service.serve(values, lambda: False)]
            return wire.response(pb_utils, replies[-1].outputs)
        except Exception as error:
            return self._failure(error)

    def _failure(self, error):
        if not isinstance(error, InvalidRequest):
            pb_utils.Logger.log_error(f"request failed: {error!r}")
        return wire.failure(pb_utils, error)
