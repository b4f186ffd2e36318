"""Feeds a slot memory through the torch decoder and through a network, and compares every call."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from masw.build.network.draft import draft_network
from masw.engines.draft_io import DraftIO
from tests.network_interpreter import NetworkInterpreter

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3}


def assert_near(found, expected, tolerance, relative=False):
    """Equal within a tolerance, or within that part of the largest expected value."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if relative:
        tolerance *= max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


class NetworkDriver:
    """One memory, the decoder that continues it, and the decoder's network."""

    def __init__(
        self, trt, pair, rule, rows=3, max_length=160, attention=None, quantized=None, **sizes
    ):
        self.decoder, self.adaptor = pair
        dtype = self.decoder.embed_tokens.weight.dtype
        self.half, self.tolerance = dtype == torch.float16, TOLERANCE[dtype]
        self.memory = self.decoder.new_memory(rule, rows, max_length)
        self.io = DraftIO.of(
            self.decoder.config,
            rule,
            max_sequences=rows,
            max_length=max_length,
            dtype=str(dtype).removeprefix("torch."),
            **{"chunk": 64, "logits": True} | sizes,
        )
        logger = trt.Logger(trt.Logger.ERROR)
        self.made = draft_network(
            trt, logger, self.io, self.decoder, self.adaptor, attention, quantized
        )
        self.interpreter = NetworkInterpreter(trt, self.made.network)

    def feed(self, new, positions):
        """Feeds {row: ids} in one call of `positions` positions, and compares all of its results.

        Appends what the decoder gives. Returns the network's outputs.
        """
        block = self.memory.block(list(new), list(new.values()))
        hidden, k, v = self.decoder(block, self.memory, self.adaptor)
        places = torch.arange(len(new)), block.last_raw.clamp(min=0)
        logits = self.decoder.logits(hidden[places])
        found = self.interpreter.run(self.feeds(block, positions))
        width = block.ids.shape[1]
        assert found.keys() == {tensor.name for tensor in self.io.outputs}
        for tensor in self.io.outputs:
            assert found[tensor.name].shape == tensor.sized(len(new), positions)
        for name, expected in (("new_k", k), ("new_v", v)):  # float16 above 4 has steps of 4e-3
            assert_near(found[name][:, :, :, :width], expected, self.tolerance, relative=self.half)
        self.compare_logits(found, logits)
        self.memory.write(block, k, v)
        self.memory.check_integrity()
        return found

    def compare_logits(self, found, logits):
        """Logits (B, V), and the best of them in order, equal those of the decoder."""
        best = logits.topk(self.io.top).values
        assert_near(found["logits"], logits, self.tolerance)
        assert_near(found["top_logits"], best, self.tolerance)
        # The ids are those of the decoder, or as good.
        assert_near(logits.gather(1, found["top_ids"].long()), best, 2 * self.tolerance)
        if not self.half:
            assert found["top_ids"][:, 0].tolist() == logits.argmax(-1).tolist()

    def feeds(self, block, positions, last=None):
        """The inputs of a call: the block, padded to `positions`, over the whole memory."""
        last = block.last_raw.clamp(min=0) if last is None else last
        feeds = {
            "rows": torch.tensor(block.rows),
            "fed": torch.tensor(block.fed),
            "last": last,
        }
        spare = positions - block.ids.shape[1]
        for name in ("ids", "times", "kind"):
            feeds[name] = F.pad(getattr(block, name), (0, spare))
        feeds = {name: value.int() for name, value in feeds.items()}
        spare = self.io.capacity - self.memory.capacity
        for layer in range(self.io.layers):
            for tensor, whole in zip(
                self.io.memory(layer), (self.memory.k, self.memory.v), strict=True
            ):
                feeds[tensor.name] = F.pad(whole[layer], (0, 0, 0, spare), value=100.0)
        return feeds
