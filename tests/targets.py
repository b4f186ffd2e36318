"""Tiny TensorRT-LLM targets, and the split of a Hugging Face model written out by hand."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
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
    cut, stage = Cut(config, tp, rank % tp), rank // tp
    share = config.num_hidden_layers // pp
    found = {}
    for local in range(share):
        found |= cut.layer(state, stage * share + local, f"transformer.layers.{local}")
    if stage == 0:
        embedding = cut.vocabulary(state["model.embed_tokens.weight"])
        found["transformer.vocab_embedding.weight"] = embedding
    if stage == pp - 1:
        found["transformer.ln_f.weight"] = state["model.norm.weight"]
        found["lm_head.weight"] = cut.vocabulary(state["lm_head.weight"])
    return found


def head_size(config) -> int:
    """Numbers of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class Cut:
    """The share of one of `tp` tensor-parallel ranks, `place`. config: Hugging Face's."""

    config: Any
    tp: int
    place: int

    def rows(self, weight: Tensor) -> Tensor:
        """This rank's outputs of a linear layer."""
        return weight.chunk(self.tp, 0)[self.place]

    def columns(self, weight: Tensor) -> Tensor:
        """This rank's inputs of a linear layer."""
        return weight.chunk(self.tp, 1)[self.place]

    def head_rows(self, weight: Tensor, heads: int) -> Tensor:
        """The rows of this rank's heads; a head shared by several ranks is copied to each."""
        first, end = (place * heads // self.tp for place in (self.place, self.place + 1))
        pieces = weight.split(head_size(self.config))
        return torch.cat(pieces[first : max(end, first + 1)])

    def vocabulary(self, weight: Tensor) -> Tensor:
        """This rank's rows of a table that zeros fill up to a multiple of the ranks."""
        each = -(-weight.shape[0] // self.tp)
        padded = weight.new_zeros(each * self.tp, weight.shape[1])
        padded[: weight.shape[0]] = weight
        return padded[self.place * each : (self.place + 1) * each]

    def layer(self, state: dict[str, Tensor], number: int, to: str) -> dict[str, Tensor]:
        """One layer's tensors, named as below `to`."""
        layer = f"model.layers.{number}"
        weights = {
            "input_layernorm": state[f"{layer}.input_layernorm.weight"],
            "post_layernorm": state[f"{layer}.post_attention_layernorm.weight"],
            "attention.dense": self.columns(state[f"{layer}.self_attn.o_proj.weight"]),
            "mlp.fc": self.rows(state[f"{layer}.mlp.gate_proj.weight"]),
            "mlp.gate": self.rows(state[f"{layer}.mlp.up_proj.weight"]),
            "mlp.proj": self.columns(state[f"{layer}.mlp.down_proj.weight"]),
        }
        for name in "qk":
            if f"{layer}.self_attn.{name}_norm.weight" in state:
                norm = state[f"{layer}.self_attn.{name}_norm.weight"]
                weights[f"attention.{name}_layernorm"] = norm
        found = {f"{to}.{name}.weight": weight for name, weight in weights.items()}
        for kind in ("weight", "bias"):
            if f"{layer}.self_attn.q_proj.{kind}" in state:
                found[f"{to}.attention.qkv.{kind}"] = self.qkv(state, layer, kind)
        return found

    def qkv(self, state: dict[str, Tensor], layer: str, kind: str) -> Tensor:
        """Queries, keys and values of this rank's heads, one below the other."""
        keys = self.config.num_key_value_heads
        heads = {"q": self.config.num_attention_heads, "k": keys, "v": keys}
        named = {name: state[f"{layer}.self_attn.{name}_proj.{kind}"] for name in heads}
        return torch.cat([self.head_rows(named[name], count) for name, count in heads.items()])


def reassembled(ranks: list[dict[str, Tensor]], config, tp: int, pp: int) -> dict[str, Tensor]:
    """The Hugging Face state dict of which `ranks` are the pieces."""
    share, vocab = config.num_hidden_layers // pp, config.vocab_size
    state = {}
    for number in range(config.num_hidden_layers):
        stage = ranks[number // share * tp :][:tp]
        pieces = _gathered(stage, f"transformer.layers.{number % share}.")
        layer = _whole(pieces) | _attention(pieces, config, tp)
        state |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    first, last = _gathered(ranks[:tp], ""), _gathered(ranks[-tp:], "")
    embedding = torch.cat(first["transformer.vocab_embedding.weight"])
    state["model.embed_tokens.weight"] = embedding[:vocab]
    state["model.norm.weight"] = last["transformer.ln_f.weight"][-1]
    state["lm_head.weight"] = torch.cat(last["lm_head.weight"])[:vocab]
    return state


def _gathered(ranks: list[dict[str, Tensor]], start: str) -> dict[str, list[Tensor]]:
    """Every tensor whose name has this start, without it: its pieces in the order of ranks."""
    names = [name for name in ranks[0] if name.startswith(start)]
    return {name.removeprefix(start): [rank[name] for rank in ranks] for name in names}


def _whole(pieces: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """A layer's weights but for queries, keys and values; norms are the same on all ranks."""
    state = {}
    for ours, theirs, axis in (
        ("attention.dense", "self_attn.o_proj", 1),
        ("mlp.fc", "mlp.gate_proj", 0),
        ("mlp.gate", "mlp.up_proj", 0),
        ("mlp.proj", "mlp.down_proj", 1),
    ):
        state[f"{theirs}.weight"] = torch.cat(pieces[f"{ours}.weight"], axis)
    for ours, theirs in (
        ("input_layernorm", "input_layernorm"),
        ("post_layernorm", "post_attention_layernorm"),
        ("attention.q_layernorm", "self_attn.q_norm"),
        ("attention.k_layernorm", "self_attn.k_norm"),
    ):
        if norms := pieces.get(f"{ours}.weight"):
            assert all(torch.equal(norm, norms[0]) for norm in norms)
            state[f"{theirs}.weight"] = norms[0]
    return state


def _attention(pieces: dict[str, list[Tensor]], config, tp: int) -> dict[str, Tensor]:
    """Queries, keys and values; of the copies of a shared head the first one counts."""
    size, copies = head_size(config), max(1, tp // config.num_key_value_heads)
    queries, keys = config.num_attention_heads // tp, max(1, config.num_key_value_heads // tp)
    state = {}
    for kind in ("weight", "bias"):
        joint = pieces.get(f"attention.qkv.{kind}", ())
        split = [piece.split([queries * size, keys * size, keys * size]) for piece in joint]
        for part, name in enumerate("qkv" if split else ""):
            chosen = [each[part] for each in split][:: 1 if name == "q" else copies]
            state[f"self_attn.{name}_proj.{kind}"] = torch.cat(chosen)
    return state
