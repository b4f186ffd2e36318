"""The draft's linear layers quantised by NVIDIA ModelOpt, calibrated on local text.

ModelOpt finds the scales on the Hugging Face model, with full attention; what is taken over are
weights, largest magnitudes and AWQ's input scales, layer by layer.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..engines.text import TextCodec
from .bench.texts import plain_ids
from .calibration import Calibration
from .draft_scheme import Scheme
from .modelopt import quantize
from .network.quantized import Fp8Linear, Int4Linear, QuantizedLinear
from .progress import Say


def quantize_draft(
    folder: Path, scheme: Scheme, dtype: str, text: Calibration | None, say: Say
) -> dict[str, QuantizedLinear]:
    """Quantised layers by their names in `Decoder`, of a Hugging Face folder.

    dtype: of the model while it is calibrated. text: None: Python's own manual. Uses the GPU where
    there is one.
    """
    sequences = calibration_ids(TextCodec(folder), scheme, text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    layers = read_layers(quantize_model(model.to(device).eval(), scheme, sequences, say))
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # TensorRT needs the room
    return layers


def calibration_ids(codec: TextCodec, scheme: Scheme, text: Calibration | None) -> list[list[int]]:
    """Sequences of ids: those of the text, or of the manual, as many as the scheme wants."""
    if text is not None:
        return text.sequences(codec.tokenizer)
    ids = plain_ids(codec, scheme.samples * scheme.length)
    return [ids[start : start + scheme.length] for start in range(0, len(ids), scheme.length)]


def quantize_model(
    model: PreTrainedModel,
    scheme: Scheme,
    sequences: Sequence[Sequence[int]],
    say: Say = lambda text: None,
) -> PreTrainedModel:
    """The model with ModelOpt's fake quantisation in its linear layers, changed in place."""
    step, terminal = max(1, len(sequences) // 4), sys.stderr

    def tick(done: int) -> None:
        if done % step == 0:
            with redirect_stderr(terminal):
                say(f"calibrating: {done} passes, {len(sequences)} texts")

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # ModelOpt talks a lot
        return quantize(model, scheme.name, "auto", sequences, tick)


def read_layers(model: PreTrainedModel) -> dict[str, QuantizedLinear]:
    """What ModelOpt put into a model's layers, on the CPU.

    Raises ValueError for anything quantised that the network would not carry.
    """
    found, carried = {}, set()
    for name, module in model.named_modules():
        if hasattr(module, "weight_quantizer") and module.weight_quantizer.is_enabled:
            found[name.removeprefix("model.")] = _read(name, module)
            carried |= {f"{name}.weight_quantizer", f"{name}.input_quantizer"}
    foreign = [name for name in found if not name.startswith("layers.")]
    foreign += [name for name in _enabled(model) if name not in carried]
    if foreign:
        raise ValueError(
            f"ModelOpt quantised {', '.join(foreign)}; the network carries linear layers only"
        )
    return found


def _enabled(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if name.endswith("_quantizer") and getattr(module, "is_enabled", False):
            yield name


def _read(name: str, layer: nn.Module) -> QuantizedLinear:
    weight, most = layer.weight.detach().cpu(), layer.weight_quantizer.amax.detach().float().cpu()
    inputs = layer.input_quantizer
    if not inputs.is_enabled:
        scale = inputs.pre_quant_scale.detach().float().cpu()
        return Int4Linear(weight, most.view(len(weight), -1), scale)
    return Fp8Linear(weight, most.item(), _finite(name, inputs.amax))


def _finite(name: str, most: Tensor | None) -> float:
    """A calibrated magnitude; raises ValueError where calibration saw none."""
    value = 0.0 if most is None else most.item()
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: its inputs are {value} over the calibration text; give another")
    return value
