"""Tiny TensorRT-LLM targets, and the split of a Hugging Face model written out by hand."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from masw.build.calibration import Calibration
from masw.build.target_checkpoint import CheckpointJob, write_checkpoint
from masw.build.target_plan import TargetPlan
from masw.engines import architectures
from masw.engines.recipe import Recipe
from tests.models import save_model
from tests.tiny_tokenizers import TEXT, byte_level

NAME = "tiny"  # of the architecture
SIZES = {  # of a model whose blocks of 128 weights can be cut in two
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.02,
}


@contextmanager
def known(folder: Path):
    """Makes a model folder's architecture one of the known ones, by the name `NAME`."""
    config = json.loads((folder / "config.json").read_text())
    everything = architectures._known() | {NAME: config}
    with mock.patch.object(architectures, "_known", lambda: everything):
        yield


def recipe_data(tp: int = 1, pp: int = 1, **target) -> dict:
    """A gpu recipe of the tiny architecture as a YAML file would hold it."""
    parts = {"tensor_parallel": tp, "pipeline_parallel": pp, "gpus": list(range(tp * pp))}
    return {
        "name": NAME,
        "lane": "gpu",
        "target": {"architecture": NAME, "max_draft_len": 16, "max_num_tokens": 64}
        | parts
        | target,
        "draft": {"architecture": "llama-3.2-3b"},
        "limits": {"max_length": 256, "max_sequences": 2, "max_draft_tokens": 5},
    }


def plan_of(folder: Path, tp: int = 1, pp: int = 1, **target) -> TargetPlan:
    """The plan of a tiny model folder."""
    with known(folder):
        return TargetPlan(Recipe(**recipe_data(tp, pp, **target)))


def calibration_text(folder: Path) -> Path:
    """A text file for calibration."""
    path = folder / "calibration.txt"
    path.write_text(TEXT * 4)
    return path


def quantizable(folder: Path, name: str = "llama-llama3", seed: int = 1) -> Path:
    """A tiny model with a tokenizer whose weights come in whole blocks."""
    return byte_level(save_model(folder, name, seed, **SIZES))


def export(folder: Path, out: Path, plan: TargetPlan, text: Path | None = None) -> Path:
    """Writes a plan's checkpoint; text: to calibrate on, 4 sequences of 32 ids."""
    calibration = Calibration(text, 4, 32) if text else None
    job = CheckpointJob(plan, folder, out, out.parent / "export.log", calibration)
    with known(folder):
        job.check()
        return write_checkpoint(job, lambda line: None)


def rank_files(out: Path) -> list[dict[str, Tensor]]:
    """The tensors of every rank, in the order of ranks."""
    count = len(list(out.glob("rank*.safetensors")))
    return [load_file(out / f"rank{rank}.safetensors") for rank in range(count)]


def by_hand(state: dict[str, Tensor], config, tp: int, pp: int, rank: int) -> dict[str, Tensor]:
    """A rank's tensors straight from Hugging Face's, rule by rule of TensorRT-LLM's layout.

    state: an untied state dict; config: its Hugging Face config.
    """
    place, stage = rank % tp, rank // tp
    share = config.num_hidden_layers // pp
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {}

    def rows(weight: Tensor) -> Tensor:
        step = weight.shape[0] // tp
        return weight[place * step : (place + 1) * step]

    def columns(weight: Tensor) -> Tensor:
        step = weight.shape[1] // tp
        return weight[:, place * step : (place + 1) * step]

    def head_rows(weight: Tensor, heads: int) -> Tensor:
        """The rows of this rank's heads; a head shared by several ranks is copied to each."""
        mine = range(place * heads // tp, max((place + 1) * heads // tp, place * heads // tp + 1))
        return torch.cat([weight[head * size : (head + 1) * size] for head in mine])

    def vocabulary(weight: Tensor) -> Tensor:
        each = -(-weight.shape[0] // tp)
        padded = weight.new_zeros(each * tp, weight.shape[1])
        padded[: weight.shape[0]] = weight
        return padded[place * each : (place + 1) * each]

    for local in range(share):
        layer = f"model.layers.{stage * share + local}"
        to = f"transformer.layers.{local}"
        found[f"{to}.input_layernorm.weight"] = state[f"{layer}.input_layernorm.weight"]
        found[f"{to}.post_layernorm.weight"] = state[f"{layer}.post_attention_layernorm.weight"]
        heads = {"q": config.num_attention_heads}
        heads |= dict.fromkeys("kv", config.num_key_value_heads)
        for kind in ("weight", "bias"):
            if f"{layer}.self_attn.q_proj.{kind}" in state:
                parts = [state[f"{layer}.self_attn.{name}_proj.{kind}"] for name in heads]
                parts = map(head_rows, parts, heads.values())
                found[f"{to}.attention.qkv.{kind}"] = torch.cat(list(parts))
        for name in "qk":
            if f"{layer}.self_attn.{name}_norm.weight" in state:
                norm = state[f"{layer}.self_attn.{name}_norm.weight"]
                found[f"{to}.attention.{name}_layernorm.weight"] = norm
        found[f"{to}.attention.dense.weight"] = columns(state[f"{layer}.self_attn.o_proj.weight"])
        found[f"{to}.mlp.fc.weight"] = rows(state[f"{layer}.mlp.gate_proj.weight"])
        found[f"{to}.mlp.gate.weight"] = rows(state[f"{layer}.mlp.up_proj.weight"])
        found[f"{to}.mlp.proj.weight"] = columns(state[f"{layer}.mlp.down_proj.weight"])
    if stage == 0:
        embedding = vocabulary(state["model.embed_tokens.weight"])
        found["transformer.vocab_embedding.weight"] = embedding
    if stage == pp - 1:
        found["transformer.ln_f.weight"] = state["model.norm.weight"]
        found["lm_head.weight"] = vocabulary(state["lm_head.weight"])
    return found


def reassembled(ranks: list[dict[str, Tensor]], config, tp: int, pp: int) -> dict[str, Tensor]:
    """The Hugging Face state dict of which `ranks` are the pieces."""
    share, vocab = config.num_hidden_layers // pp, config.vocab_size
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads // tp, max(1, config.num_key_value_heads // tp)
    copies = max(1, tp // config.num_key_value_heads)
    state = {}

    def gather(name: str, stage: int) -> list[Tensor]:
        return [ranks[stage * tp + place][name] for place in range(tp)]

    for number in range(config.num_hidden_layers):
        stage, here = number // share, f"transformer.layers.{number % share}"
        layer = f"model.layers.{number}"
        for kind in ("weight", "bias"):
            if f"{here}.attention.qkv.{kind}" not in ranks[stage * tp]:
                continue
            split = [
                piece.split([queries * size, keys * size, keys * size])
                for piece in gather(f"{here}.attention.qkv.{kind}", stage)
            ]
            for part, name in enumerate("qkv"):
                pieces = [each[part] for each in split][:: 1 if name == "q" else copies]
                state[f"{layer}.self_attn.{name}_proj.{kind}"] = torch.cat(pieces)
        for ours, theirs, axis in (
            ("attention.dense", "self_attn.o_proj", 1),
            ("mlp.fc", "mlp.gate_proj", 0),
            ("mlp.gate", "mlp.up_proj", 0),
            ("mlp.proj", "mlp.down_proj", 1),
        ):
            pieces = gather(f"{here}.{ours}.weight", stage)
            state[f"{layer}.{theirs}.weight"] = torch.cat(pieces, axis)
        for ours, theirs in (
            ("input_layernorm", "input_layernorm"),
            ("post_layernorm", "post_attention_layernorm"),
            ("attention.q_layernorm", "self_attn.q_norm"),
            ("attention.k_layernorm", "self_attn.k_norm"),
        ):
            if f"{here}.{ours}.weight" in ranks[stage * tp]:
                pieces = gather(f"{here}.{ours}.weight", stage)
                assert all(torch.equal(piece, pieces[0]) for piece in pieces)
                state[f"{layer}.{theirs}.weight"] = pieces[0]
    embedding = torch.cat(gather("transformer.vocab_embedding.weight", 0))
    state["model.embed_tokens.weight"] = embedding[:vocab]
    state["model.norm.weight"] = ranks[-1]["transformer.ln_f.weight"]
    state["lm_head.weight"] = torch.cat(gather("lm_head.weight", pp - 1))[:vocab]
    return state
