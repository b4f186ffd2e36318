"""Training rows: ids of fixed length and the weight of the prediction made at each position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...engines.text import TextCodec
from ..fitting import fit_prompt
from ..progress import Say
from .samples import DataError, Sample, read_samples
from .sources import Exchange, Source


@dataclass(frozen=True)
class Rows:
    """Rows of one length n. ids (R, n) int32; weight (R, n) float32 of predicting token i + 1."""

    ids: np.ndarray
    weight: np.ndarray

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.ids.shape[1]

    def __len__(self) -> int:
        return len(self.ids)


def packed_rows(documents: Iterable[Sequence[int]], length: int, end_id: int) -> Rows:
    """Documents one after the other, `end_id` after each, cut into rows of `length` tokens.

    The last, incomplete row is left out. Raises DataError if there is no whole row.
    """
    parts = [np.append(np.asarray(ids, np.int32), np.int32(end_id)) for ids in documents]
    stream = np.concatenate(parts) if parts else np.empty(0, np.int32)
    rows = len(stream) // length
    if rows == 0:
        raise DataError(f"the data has {len(stream)} tokens; a row of {length} needs more")
    weight = np.ones((rows, length), np.float32)
    weight[:, -1] = 0  # its next token is in another row
    return Rows(stream[: rows * length].reshape(rows, length), weight)


def sample_rows(
    samples: Iterable[Sample], lengths: Sequence[int], end_id: int, prompt_weight: float
) -> list[Rows]:
    """Samples padded to the shortest of `lengths` that holds them, by length.

    prompt_weight: weight of predictions inside the prompt; those of the answer have 1 (0 masks the
    loss to the answer). A sample longer than all lengths loses the start of its prompt.
    """
    buckets: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {n: [] for n in sorted(lengths)}
    longest = max(buckets)
    for sample in samples:
        if not 0 < len(sample.answer) < longest:
            raise DataError(
                f"sample {sample.name!r} has an answer of {len(sample.answer)} tokens; "
                f"1 to {longest - 1} fit rows of {longest}"
            )
        prompt = sample.prompt[-(longest - len(sample.answer)) :]
        total = len(prompt) + len(sample.answer)
        length = next(n for n in buckets if n >= total)
        ids = np.full(length, end_id, np.int32)
        ids[:total] = prompt + sample.answer
        weight = np.zeros(length, np.float32)
        weight[: len(prompt) - 1] = prompt_weight
        weight[len(prompt) - 1 : total - 1] = 1
        buckets[length].append((ids, weight))
    return [
        Rows(np.stack([ids for ids, _ in rows]), np.stack([weight for _, weight in rows]))
        for rows in buckets.values()
        if rows
    ]


def pretraining_rows(
    sources: Sequence[Source], codec: TextCodec, length: int, end_id: int, say: Say
) -> list[Rows]:
    """All documents of the sources, packed to `length`."""
    return [packed_rows(_document_ids(sources, codec, say), length, end_id)]


def _document_ids(sources: Sequence[Source], codec: TextCodec, say: Say):
    for source in sources:
        say(f"reading {source}")
        if source.name == "ids":
            yield from _split(np.load(source.path))
        elif source.name == "samples":
            yield from (sample.ids for sample in read_samples(source.path))
        else:
            for text in source.documents():
                yield codec.tokenizer(text, add_special_tokens=False)["input_ids"]


def _split(ids: np.ndarray) -> list[np.ndarray]:
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"ids are {ids.dtype} of shape {ids.shape}; give integers in one dimension")
    return [ids]


def tuning_rows(
    sources: Sequence[Source],
    codec: TextCodec,
    lengths: Sequence[int],
    end_id: int,
    prompt_weight: float,
    say: Say,
) -> list[Rows]:
    """All questions and answers of the sources as padded rows."""

    def samples():
        for source in sources:
            say(f"reading {source}")
            if source.name == "samples":
                yield from (sample for sample in read_samples(source.path) if sample.answer)
            else:
                for exchange in source.exchanges():
                    yield exchange_sample(exchange, codec, max(lengths), end_id)

    return sample_rows(samples(), lengths, end_id, prompt_weight)


def exchange_sample(exchange: Exchange, codec: TextCodec, length: int, end_id: int) -> Sample:
    """An exchange as ids of at most `length`, in the model's chat template where it has one.

    The document loses its end, the answer at most all beyond a quarter of the length.
    """
    answer = codec.tokenizer(exchange.answer, add_special_tokens=False)["input_ids"]
    answer = [*answer[: length // 4 - 1], end_id]
    prompt = document_prompt(codec, exchange.document, exchange.question, length - len(answer))
    return Sample(tuple(prompt), tuple(answer))


def document_prompt(codec: TextCodec, document: str, question: str, length: int) -> list[int]:
    """Ids of document and question in at most `length` tokens; see `fit_prompt`."""
    prompt = fit_prompt(codec, document, question, length)
    if prompt is None:
        raise DataError(f"the question {question[:40]!r} does not fit into {length} tokens")
    return list(prompt.ids)
