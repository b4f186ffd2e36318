"""Training rows: ids of fixed length and the weight of the prediction made at each position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from ...engines.config import DecoderConfig
from ...engines.text import TextCodec
from ..fitting import fit_prompt
from ..progress import Say
from .samples import DataError, Sample, check_vocabulary, located, read_samples
from .settings import TrainSettings
from .sources import Exchange, Source


class QuestionTooLong(DataError):
    """A question that does not fit, even without its document."""


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


def training_rows(
    sources: Sequence[Source],
    codec: TextCodec,
    model: DecoderConfig,
    settings: TrainSettings,
    tuning: bool,
    say: Say,
) -> list[Rows]:
    """What a stage trains on, by length: questions and answers when tuning, else documents.

    Raises DataError for lengths beyond the model's positions and for ids beyond its vocabulary.
    """
    check_lengths(settings, model)
    if tuning:
        end_id = answer_end_id(codec, model.eos_ids)
        limits = settings.lengths, end_id, settings.prompt_weight
        return tuning_rows(sources, codec, model.vocab_size, *limits, say)
    end_id = model.eos_ids[0] if model.eos_ids else 0
    ids = list(document_ids(sources, codec, model.vocab_size, say))
    return [packed_rows(ids, length, end_id) for length in settings.lengths]


def check_lengths(settings: TrainSettings, model: DecoderConfig) -> None:
    """Raises DataError for rows longer than the model has positions."""
    if max(settings.lengths) > model.max_positions:
        raise DataError(
            f"lengths has {max(settings.lengths)}; the model has {model.max_positions} positions"
        )


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


def document_ids(
    sources: Sequence[Source], codec: TextCodec, vocab_size: int, say: Say
) -> Iterator[np.ndarray]:
    """Ids (n,) int32 of every document of the sources.

    Raises DataError for ids beyond the vocabulary and for a source without documents.
    """
    for source in sources:
        say(f"reading {source}")
        empty = True
        for ids in _documents(source, codec, vocab_size):
            empty = False
            yield np.asarray(ids, np.int32)
        if empty:
            raise DataError(f"{source} has no documents")


def _documents(source: Source, codec: TextCodec, vocab_size: int) -> Iterator[Sequence[int]]:
    if source.name == "ids":
        yield _array(source.path, vocab_size)
    elif source.name == "samples":
        yield from (sample.ids for sample in _samples(source.path, vocab_size))
    else:
        for text in source.documents():
            ids = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
            with located(str(source)):
                check_vocabulary(ids, vocab_size)
            yield ids


def _array(path: Path, vocab_size: int) -> np.ndarray:
    """Ids (n,) of a .npy file. Raises DataError for anything else and ids out of range."""
    try:
        ids = np.load(path)
    except (ValueError, EOFError, BadZipFile, MemoryError) as error:
        raise DataError(f"{path}: no .npy array: {error}") from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        shown = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else "an archive"
        raise DataError(f"{path}: ids are {shown}; give integers in one dimension")
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        place = int(wrong.argmax())
        raise DataError(f"{path}: id {ids[place]} at {place}; it must be 0 to {vocab_size - 1}")
    return ids


def _samples(path: Path, vocab_size: int) -> list[Sample]:
    samples = read_samples(path)
    for number, sample in enumerate(samples, 1):
        with located(f"{path}: sample {number}"):
            check_vocabulary(sample.ids, vocab_size)
    return samples


def tuning_rows(
    sources: Sequence[Source],
    codec: TextCodec,
    vocab_size: int,
    lengths: Sequence[int],
    end_id: int,
    prompt_weight: float,
    say: Say,
) -> list[Rows]:
    """All questions and answers of the sources as padded rows.

    Raises DataError for ids beyond the vocabulary, and for a source of which nothing fits.
    """

    def samples():
        for source in sources:
            say(f"reading {source}")
            if source.name == "samples":
                yield from _answered_samples(source, vocab_size, max(lengths), say)
                continue
            for sample in _exchange_samples(source, codec, max(lengths), end_id, say):
                with located(str(source)):
                    check_vocabulary(sample.ids, vocab_size)
                yield sample

    return sample_rows(samples(), lengths, end_id, prompt_weight)


def _answered_samples(source: Source, vocab_size: int, length: int, say: Say) -> list[Sample]:
    """Those with answers; tells how many have none, and how many do not fit whole.

    Raises DataError if none has an answer.
    """
    samples = _samples(source.path, vocab_size)
    answered = [sample for sample in samples if sample.answer]
    if not answered:
        raise DataError(f"{source}: none of its {len(samples)} samples has an answer")
    if skipped := len(samples) - len(answered):
        say(f"{source}: skipped {skipped} of {len(samples)} samples, without answers")
    if cut := sum(len(sample.ids) > length for sample in answered):
        say(f"{source}: {cut} samples are longer than {length} tokens and lose their beginning")
    return answered


def _exchange_samples(
    source: Source, codec: TextCodec, length: int, end_id: int, say: Say
) -> Iterator[Sample]:
    """Those that fit; tells how many do not. Raises DataError if there are none."""
    total = skipped = 0
    for exchange in source.exchanges():
        total += 1
        try:
            sample = exchange_sample(exchange, codec, length, end_id)
        except QuestionTooLong:
            skipped += 1
            continue
        yield sample
    if total == 0:
        raise DataError(f"{source} has no questions and answers")
    if skipped == total:
        raise DataError(f"{source}: none of its {total} questions fits into {length} tokens")
    if skipped:
        say(f"{source}: skipped {skipped} of {total} questions, longer than {length} tokens")


def answer_end_id(codec: TextCodec, end_ids: Sequence[int]) -> int:
    """The id that ends an answer: the chat's where the model has a template, else the first."""
    chat = codec.tokenizer.eos_token_id
    if codec.tokenizer.chat_template and chat in end_ids:
        return chat
    return end_ids[0] if end_ids else 0


def exchange_sample(exchange: Exchange, codec: TextCodec, length: int, end_id: int) -> Sample:
    """An exchange as ids of at most `length`, in the model's chat template where it has one.

    The document loses its end, the answer at most all beyond a quarter of the length. Raises
    QuestionTooLong.
    """
    answer = codec.tokenizer(exchange.answer, add_special_tokens=False)["input_ids"]
    answer = [*answer[: length // 4 - 1], end_id]
    prompt = document_prompt(codec, exchange.document, exchange.question, length - len(answer))
    return Sample(tuple(prompt), tuple(answer))


def document_prompt(codec: TextCodec, document: str, question: str, length: int) -> list[int]:
    """Ids of document and question in at most `length` tokens; see `fit_prompt`.

    Raises QuestionTooLong if the question alone does not fit.
    """
    prompt = fit_prompt(codec, document, question, length)
    if prompt is None:
        raise QuestionTooLong(f"the question {question[:40]!r} does not fit into {length} tokens")
    return list(prompt.ids)
