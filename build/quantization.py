"""Ways to quantise linear layers, of target and draft: what each asks of GPU, model and text."""

from __future__ import annotations

from dataclasses import dataclass

from ..engines.config import DecoderConfig
from .calibration import SAMPLES


@dataclass(frozen=True)
class Quantization:
    """sm: the least compute capability, 89 for 8.9. block: neighbouring inputs whose weights share
    a scale, 0 where all do. samples: sequences of calibration text."""

    name: str
    sm: int
    block: int = 0
    samples: int = SAMPLES

    def uneven(self, model: DecoderConfig, ranks: int = 1) -> tuple[str, int] | None:
        """Name and size of the first width whose share of a rank is not of whole blocks."""
        widths = {
            "hidden_size": model.hidden_size,
            "heads x head_dim": model.heads * model.head_dim,
            "intermediate_size": model.intermediate_size,
        }
        found = (item for item in widths.items() if self.block and item[1] // ranks % self.block)
        return next(found, None)


# In the order of the recipe's names. AWQ searches over all samples, so it has fewer.
QUANTIZATIONS = {
    each.name: each
    for each in (
        Quantization("none", 80),
        Quantization("fp8", 89),
        Quantization("int4_awq", 80, block=128, samples=32),
        Quantization("nvfp4", 100, block=16),
    )
}


def sm_of(capability: str) -> int:
    """A compute capability as one number: 90 for "9.0"."""
    major, minor = capability.split(".")
    return 10 * int(major) + int(minor)
