"""Draft and target pairs of tiny random models, and what Hugging Face generates for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers

from masw.engines.adaptor import AdaptorConfig
from masw.engines.decoder import Decoder
from masw.engines.draft import TorchDraft
from masw.engines.local import generate_all
from masw.engines.messages import Target, TargetCall, Verdict
from masw.engines.sequence import GenerationRequest
from masw.engines.speculative import LoopSettings
from masw.engines.target import TorchTarget
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import random_ids, random_model

S = W = R = 16
CHUNK = 24  # prompts cross it, and it crosses every edge of the memory
MAX_LENGTH = 288
# Around every edge: sink, S + W, S + W + R, the chunk, and many windows.
LENGTHS = (1, 15, 16, 17, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 72, 96, 128, 200, 233, 240)
MARGIN = 1e-4  # what rounding may move a logit by, several times over
MODES = ("slots", "full", "window", "none")


@dataclass(frozen=True)
class Kind:
    """How a draft remembers: its mode and, for slots, interval r and visibility."""

    mode: str = "slots"
    interval: int = 4
    visibility: str = "evicted"

    def rule(self, max_length: int = MAX_LENGTH) -> MemoryRule:
        """The memory rule of this kind at the tests' S, W and R."""
        if self.mode == "full":
            return MemoryRule.full(max_length)
        if self.mode == "window":
            return MemoryRule.windowed(S, W, R)
        return MemoryRule(S, W, R, self.interval, self.visibility)


@dataclass(frozen=True)
class Pair:
    """A Hugging Face model, the target decoder loaded from its files, and drafts by name.

    "same" is the target's own model, "near" a perturbed copy, "other" a random one.
    """

    hf: transformers.PreTrainedModel
    target: Decoder
    drafts: dict[str, Decoder]


def to_decoder(model: transformers.PreTrainedModel, directory: Path) -> Decoder:
    """The decoder of a Hugging Face model, by way of files."""
    model.save_pretrained(directory)
    return Decoder.load(directory)


def perturbed(model: transformers.PreTrainedModel, noise: float) -> transformers.PreTrainedModel:
    """A copy whose weights are moved by `noise` times their own spread."""
    near = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in near.parameters():
            spread = parameter.data.std() if parameter.numel() > 1 else 0
            parameter.data += noise * spread * torch.randn_like(parameter)
    return near


def build_pair(
    directory: Path, name: str = "llama", noise: float = 0.02, seed: int = 0, **changes
) -> Pair:
    """A pair of one family of `tests.models`; `changes` go to the config."""
    changes = {"num_hidden_layers": 2} | changes
    model = random_model(name, seed, **changes)
    target = to_decoder(model, directory / "target")
    drafts = {
        "same": target,
        "near": to_decoder(perturbed(model, noise), directory / "near"),
        "other": to_decoder(random_model(name, seed + 1, **changes), directory / "other"),
    }
    return Pair(model, target, drafts)


def new_draft(decoder: Decoder, kind: Kind = Kind(), **limits) -> TorchDraft:
    """A draft of that kind with an adaptor of copied projections."""
    limits = {"max_sequences": 4, "max_length": MAX_LENGTH, "chunk": CHUNK} | limits
    rule, adaptor = kind.rule(limits["max_length"]), None
    if rule.interval:
        config = AdaptorConfig(decoder.fingerprint(), S, W, kind.interval, kind.visibility)
        adaptor = decoder.copy_adaptor(config)
    return TorchDraft(decoder, rule, adaptor, **limits)


def new_target(decoder: Decoder, **limits) -> TorchTarget:
    """A target with full KV and the tests' limits."""
    limits = {"max_sequences": 4, "max_length": MAX_LENGTH, "chunk": CHUNK} | limits
    return TorchTarget(decoder, **limits)


def loop_settings(**changes) -> LoopSettings:
    """Settings of the loop with the tests' limits and the default kind's rule."""
    defaults = {"max_length": MAX_LENGTH, "draft_chunk": CHUNK, "rule": Kind().rule()}
    return LoopSettings(**(defaults | changes))


def prompts() -> list[tuple[int, ...]]:
    """One random prompt of each of LENGTHS."""
    return [tuple(random_ids(length, seed=length)) for length in LENGTHS]


def reference(
    model: transformers.PreTrainedModel,
    ids: Sequence[int],
    max_tokens: int,
    end_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """New ids of Hugging Face's greedy `generate`, which must be no matter of rounding."""
    model.generation_config.eos_token_id = list(end_ids) or None
    answer = model.generate(
        torch.tensor([ids]),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    first, second = torch.cat(answer.scores).topk(2).values.unbind(-1)
    assert (first - second).min() > MARGIN, "choose another seed: two tokens are as good as equal"
    return answer.sequences[0, len(ids) :].tolist()


def run(pair: Pair, draft: str, kind: Kind, requests, **changes):
    """[(ids, statistics)] of all requests at once, in one batch; mode none has no draft."""
    size = {"max_sequences": len(requests)}
    engine = None if kind.mode == "none" else new_draft(pair.drafts[draft], kind, **size)
    target = RecordingTarget(new_target(pair.target, **size))
    settings = loop_settings(rule=None if engine is None else engine.memory.rule, **changes)
    answers = generate_all(target, engine, settings, requests)
    target.inner.memory.check_integrity()
    if engine is not None:
        engine.memory.check_integrity()
        assert len(engine._free_rows) == len(requests)
    return answers, target.steps


def requests_of(all_ids, max_tokens: int, **changes) -> list[GenerationRequest]:
    """One request for each prompt."""
    request = GenerationRequest((1,), max_tokens, **changes)
    return [replace(request, ids=tuple(ids)) for ids in all_ids]


@dataclass(frozen=True)
class Step:
    """One call that the target answered."""

    call: TargetCall
    ids: tuple[int, ...]

    @property
    def drafts(self) -> tuple[int, ...]:
        """The proposal that was verified."""
        return self.call.proposal.ids

    @property
    def accepted(self) -> int:
        """Draft tokens that were kept."""
        pairs = list(zip(self.ids, self.drafts, strict=False))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


class RecordingTarget(Target):
    """A target that keeps every call it answered."""

    def __init__(self, inner: TorchTarget):
        self.inner, self.steps = inner, []

    def verify(self, calls: Sequence[TargetCall]) -> list[Verdict | Exception]:
        calls = [replace(call, ids=np.array(call.ids)) for call in calls]
        answers = self.inner.verify(calls)
        for call, answer in zip(calls, answers, strict=True):
            self.steps.append(Step(call, getattr(answer, "ids", ())))
        return answers
