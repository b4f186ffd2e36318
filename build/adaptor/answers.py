"""The target's own greedy answers: the tokens that verification will compare drafts with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...engines.config import end_ids
from ...engines.target import until_end
from .samples import DataError, Sample, check_vocabulary, located


class Answerer:
    """Greedy answers by Hugging Face's `generate`, in batches of prompts of similar length.

    Every token is the argmax: of the folder's own way to generate (penalties, suppressed tokens)
    only the end ids are kept.
    """

    def __init__(self, model: Path, dtype: torch.dtype, device: str = "cpu"):
        from transformers import AutoModelForCausalLM, GenerationConfig

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True)
        self.model = loaded.to(device).requires_grad_(False).eval()
        self.device, self.end_ids = device, list(end_ids(model))
        # `generate` takes from here whatever a call leaves open.
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=self.end_ids or None, pad_token_id=0
        )

    def check(self, samples: Sequence[Sample], max_tokens: int) -> None:
        """Raises DataError for no prompts, and for one with ids or a length the model lacks."""
        if not samples:
            raise DataError("there are no prompts; the file is empty")
        most = self.model.config.max_position_embeddings
        for sample in samples:
            with located(f"sample {sample.name!r}"):
                check_vocabulary(sample.prompt, self.model.config.vocab_size)
                if len(sample.prompt) + max_tokens > most:
                    raise DataError(
                        f"a prompt of {len(sample.prompt)} tokens and max_tokens {max_tokens}; "
                        f"the model takes {most} together"
                    )

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
            max_new_tokens=max_tokens,
        )[:, longest:]
        return [until_end(answer, self.end_ids) for answer in generated.tolist()]
