"""Decoders of published shapes with random weights, to measure speed without weight files."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ...engines.adaptor import Adaptor
from ...engines.config import DecoderConfig
from ...engines.decoder import Decoder
from ...engines.memory import SlotMemory
from ...engines.pair import DTYPES
from ...engines.rotary import RotaryTable
from ...plugins.slot_attention.block import Block
from .record import BenchError


def type_of(name: str) -> torch.dtype:
    """The torch type of a name; raises ValueError for another."""
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; choose from {', '.join(DTYPES)}")
    return DTYPES[name]


def random_decoder(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder of these sizes with small random weights, made on the device."""
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    decoder.to_empty(device=device)
    if config.tied_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    decoder.rotary = RotaryTable(config).to(device)
    for name, weight in decoder.named_parameters():
        weight.data.fill_(1) if "norm" in name else weight.data.normal_(0, 0.02)
    return decoder.requires_grad_(False).eval()


class PlainDecoder(Decoder):
    """A decoder over a plain cache of one sequence that attends by torch's own fused attention.

    It puts new keys into the cache first, as static caches do, beyond the fed length, where
    `memory.write` puts them again.
    """

    def forward(
        self, block: Block, memory: SlotMemory, adaptor: Adaptor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Decoder.forward`, but for the cache."""
        [row], [fed] = block.rows, block.fed

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            count = q.shape[2]
            keys, values = (
                x[number, row : row + 1, :, : fed + count] for x in (memory.k, memory.v)
            )
            keys[:, :, fed:], values[:, :, fed:] = k, v
            bias = causal_lower_right(count, fed + count) if count > 1 else None
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, enable_gqa=True)

        hidden, pairs = self.run(block, attend, adaptor)
        return hidden, torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def with_plain_attention(decoder: Decoder) -> PlainDecoder:
    """A `PlainDecoder` that shares all weights."""
    with torch.device("meta"):
        plain = PlainDecoder(decoder.config)
    plain.load_state_dict(decoder.state_dict(), assign=True)
    plain.rotary = decoder.rotary
    return plain.requires_grad_(False).eval()


def check_device(name: str) -> torch.device:
    """A usable device of this name; raises BenchError with the reason otherwise."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError(f"device is {name}, but torch sees no CUDA device")
    return device
