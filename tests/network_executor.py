"""The compiled draft without a GPU: its network evaluated by the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from masw.build.network.draft import draft_network
from masw.engines.draft_io import DraftIO
from masw.engines.engine_folder import Builder, DraftEngine
from masw.engines.executor import Executor
from tests.network_interpreter import NetworkInterpreter


@dataclass
class BoundCall:
    """A call that was bound, with the addresses it had then."""

    profile: str
    tensors: dict
    addresses: dict
    runs: int = 0


class NetworkExecutor(Executor):
    """Evaluates the network of a draft, and refuses what TensorRT would refuse."""

    def __init__(self, trt, io: DraftIO, decoder, adaptor=None):
        self.device = torch.device("cpu")
        self.io = io
        self.made = draft_network(trt, trt.Logger(trt.Logger.ERROR), io, decoder, adaptor)
        self.interpreter = NetworkInterpreter(trt, self.made.network)
        self.calls: list[BoundCall] = []

    def bind(self, profile, tensors):
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        call = BoundCall(profile, tensors, addresses)
        self._check(call)
        self.calls.append(call)

        def run():
            call.runs += 1
            assert call.addresses == {name: x.data_ptr() for name, x in tensors.items()}
            feeds = {tensor.name: tensors[tensor.name] for tensor in self.io.inputs}
            for name, value in self.interpreter.run(feeds).items():
                tensors[name].copy_(value)

        return run

    def _check(self, call):
        """Names, dtypes, shapes within the profile, and memory that is contiguous."""
        (profile,) = (p for p in self.io.profiles if p.name == call.profile)
        known = (*self.io.inputs, *self.io.outputs)
        assert call.tensors.keys() == {tensor.name for tensor in known}
        batch, positions = call.tensors["ids"].shape
        assert profile.batch[0] <= batch <= profile.batch[2]
        assert profile.positions[0] <= positions <= profile.positions[2]
        for tensor in known:
            found = call.tensors[tensor.name]
            assert tuple(found.shape) == tensor.sized(batch, positions), tensor.name
            assert found.dtype == getattr(torch, tensor.dtype) and found.is_contiguous()


def new_engine(decoder, rule, *, draft_tokens=16, **sizes) -> DraftEngine:
    """What the folder of such an engine would state."""
    sizes = {"dtype": "float32", "logits": True} | sizes
    io = DraftIO.of(decoder.config, rule, **sizes)
    builder = Builder("tensorrt_rtx", "1.7", "native")
    return DraftEngine(decoder.config, io, draft_tokens, builder, decoder.fingerprint())
