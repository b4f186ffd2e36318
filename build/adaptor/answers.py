"""The target's own greedy answers: the tokens that verification will compare drafts with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...engines.target import until_end
from .samples import Sample


class Answerer:
    """Greedy answers by Hugging Face's `generate`, in batches of prompts of similar length."""

    def __init__(self, model: Path, dtype: torch.dtype, device: str = "cpu"):
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model = loaded.to(device).requires_grad_(False).eval()
        self.device, eos = device, self.model.generation_config.eos_token_id
        self.end_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]

    def run(
        self, samples: Sequence[Sample], max_tokens: int, batch_size: int, done: int = 0
    ) -> Iterator[list[Sample]]:
        """The samples with answers of at most `max_tokens`, end id included, batch by batch.

        Short prompts first; done: how many of them, in this order, have their answers already.
        """
        order = sorted(samples, key=lambda sample: len(sample.prompt))
        for start in range(done, len(order), batch_size):
            batch = order[start : start + batch_size]
            yield [
                replace(sample, answer=tuple(answer))
                for sample, answer in zip(batch, self._answers(batch, max_tokens), strict=True)
            ]

    def _answers(self, batch: Sequence[Sample], max_tokens: int) -> list[list[int]]:
        """Prompts are padded on the left; what follows an end id is cut off."""
        longest = max(len(sample.prompt) for sample in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, sample in enumerate(batch):
            ids[i, longest - len(sample.prompt) :] = torch.tensor(sample.prompt)
            mask[i, longest - len(sample.prompt) :] = 1
        generated = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )[:, longest:]
        return [until_end(answer, self.end_ids) for answer in generated.tolist()]
