"""The draft's linear layers in dynamic int8, for the cpu lane."""

from __future__ import annotations

import warnings

from torch import Tensor, nn

from .decoder import Decoder
from .linear import Linear

TINY = 1e-30  # a row of zeros stays one


class Int8Linear(nn.Module):
    """An int8 copy of a linear layer, with one weight scale for each output; a float bias.

    The library has one scale for the inputs of a call. Rows are brought to the same size first, so
    that each has its own: a few tokens with huge activations would cost all others their precision.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain.weight, self.bias = layer.weight, layer.bias
        self.inner = _dynamic_int8(plain)

    def forward(self, x: Tensor) -> Tensor:
        """(..., outputs) in the dtype of x (..., inputs)."""
        wide = x.float()
        most = wide.abs().amax(-1, keepdim=True).clamp(min=TINY)
        y = self.inner(wide / most) * most
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def _dynamic_int8(layer: nn.Linear) -> nn.Module:
    """torch's own int8 layer, one weight scale for each output."""
    from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear
    from torch.ao.quantization import per_channel_dynamic_qconfig

    layer.qconfig = per_channel_dynamic_qconfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # quantised tensors will leave torch one day
        return DynamicLinear.from_float(layer)


def to_int8(decoder: Decoder) -> Decoder:
    """Replaces every linear layer of a decoder on the CPU by its int8 copy; returns the decoder.

    Embeddings and norms stay as they are. Afterwards the decoder has no fingerprint and makes no
    adaptor: read those first.
    """
    for parent in list(decoder.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Linear):
                setattr(parent, name, Int8Linear(child))
    return decoder
