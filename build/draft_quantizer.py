"""The draft's linear layers quantised by NVIDIA ModelOpt, calibrated on local text.

ModelOpt finds the scales on the Hugging Face model, with full attention; what is taken over are
weights, largest magnitudes and AWQ's input scales, layer by layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..engines.text import TextCodec
from .adaptor.sources import Source
from .bench.texts import read_documents
from .draft_scheme import Scheme
from .network.quantized import Fp8Linear, Int4Linear, QuantizedLinear

CHARACTERS_PER_TOKEN = 12  # more than any text of a document has


def quantize_draft(
    folder: Path, scheme: Scheme, dtype: str, text: Path | None = None
) -> dict[str, QuantizedLinear]:
    """Quantised layers by their names in `Decoder`, of a Hugging Face folder.

    dtype: of the model while it is calibrated. text: see `calibration_ids`. Uses the GPU where
    there is one.
    """
    samples = calibration_ids(TextCodec(folder), text, scheme)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    layers = read_layers(quantize_model(model.to(device).eval(), scheme, samples))
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # TensorRT needs the room
    return layers


def calibration_ids(codec: TextCodec, text: Path | None, scheme: Scheme) -> list[list[int]]:
    """Up to `scheme.samples` pieces of `scheme.length` tokens.

    text: a text file, or JSON lines with "text"; None: Python's own manual.
    Raises ValueError if it has fewer tokens than one piece.
    """
    ids: list[int] = []
    wanted = scheme.samples * scheme.length
    for document in _documents(text):
        text_start = document[: wanted * CHARACTERS_PER_TOKEN]
        ids += codec.tokenizer(text_start, add_special_tokens=False)["input_ids"]
        if len(ids) >= wanted:
            break
    if len(ids) < scheme.length:
        raise ValueError(
            f"calibration text {text} has {len(ids)} tokens; give {scheme.length} or more, "
            f"{wanted} are used"
        )
    starts = range(0, min(len(ids), wanted) - scheme.length + 1, scheme.length)
    return [ids[start : start + scheme.length] for start in starts]


def quantize_model(
    model: PreTrainedModel, scheme: Scheme, samples: Sequence[Sequence[int]]
) -> PreTrainedModel:
    """The model with ModelOpt's fake quantisation in its linear layers, changed in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about versions of transformers, and of its own forms
        import modelopt.torch.quantization as mtq

        def calibrate(model: PreTrainedModel) -> None:
            for ids in samples:
                model(torch.tensor([ids], device=model.device), use_cache=False)

        with torch.no_grad():
            return mtq.quantize(model, getattr(mtq, scheme.modelopt), forward_loop=calibrate)


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


def _documents(text: Path | None) -> Iterator[str]:
    if text is None:
        yield next(read_documents(None)).text
    else:
        yield from Source("text", text).documents()


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
