"""Training and evaluation samples: token ids of a prompt and of its answer."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ...engines.whole_file import whole_file

T = TypeVar("T")
_KINDS = {str: "a text", int: "a whole number", list: "a list"}


class DataError(ValueError):
    """Data that cannot be used; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer as ids. kind: what sort of text; prefix: nominal prompt length.

    Raises DataError for ids that are no whole numbers from 0 on, and for an empty prompt.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    kind: str = ""
    prefix: int = 0
    name: str = ""

    def __post_init__(self):
        for field, kind in (("kind", str), ("prefix", int), ("name", str)):
            typed(getattr(self, field), field, kind)
        for field in ("prompt", "answer"):
            object.__setattr__(self, field, _ids(getattr(self, field), field))
        if not self.prompt:
            raise DataError(f"sample {self.name!r} has an empty prompt")

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.answer

    @cached_property
    def digest(self) -> str:
        """Hash of kind, prefix, prompt and answer."""
        content = (self.kind, self.prefix, self.prompt, self.answer)
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Writes samples as JSON lines, atomically; compressed if the name ends in .gz.

    The same samples give the same bytes.
    """
    lines = (json.dumps(asdict(sample), separators=(",", ":")) + "\n" for sample in samples)
    with whole_file(path) as part, part.open("wb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:
                compressed.writelines(line.encode() for line in lines)
        else:
            file.writelines(line.encode() for line in lines)


def read_samples(path: Path) -> list[Sample]:
    """Reads what `write_samples` wrote. Raises DataError naming file and line."""
    return [_sample(row, place) for row, place in read_rows(path)]


def _sample(row: dict, place: str) -> Sample:
    with located(place):
        try:
            return Sample(**row)
        except TypeError as error:
            raise DataError(f"no sample of prompt and answer ids: {error}") from None


def _ids(values: Any, name: str) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise DataError(f"{name} is {_shown(values)}; it must be a list of token ids")
    wrong = [i for i in values if type(i) is not int or i < 0]
    if wrong:
        raise DataError(f"{name} has {_shown(wrong[0])}; token ids are whole numbers from 0 on")
    return tuple(values)


def check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Raises DataError for an id that a vocabulary of this size lacks."""
    if len(ids) and max(ids) >= vocab_size:
        raise DataError(f"token id {max(ids)} is not of this model: it has 0 to {vocab_size - 1}")


def read_rows(path: Path) -> Iterator[tuple[dict, str]]:
    """The objects of a JSON lines file (.gz: compressed) with their places "file:line"."""
    for line, place in read_lines(path):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{place}: no JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{place}: a line holds one JSON object")
            yield row, place


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a UTF-8 file (.gz: compressed), ends included, with their places "file:line".

    Raises DataError naming the place of bytes that are no UTF-8 or no whole gzip file.
    """
    if not path.is_file():
        raise DataError(f"{path} {'is no file' if path.exists() else 'does not exist'}")
    number, opened = 0, gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                yield _utf8(line, f"{path}:{number}"), f"{path}:{number}"
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}:{number + 1}: no whole gzip file: {error}") from None


def _utf8(line: str, place: str) -> str:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        byte = ord(line[error.start]) - 0xDC00  # how it was escaped
        raise DataError(f"{place}: byte {byte:#x} at {error.start + 1} is no UTF-8") from None
    return line


def field_of(row: Any, name: str, kind: type[T]) -> T:
    """A field of a row. Raises DataError naming it if it is missing or of another type."""
    if not isinstance(row, dict):
        raise DataError(f"{_shown(row)} is no object with {name!r}")
    if name not in row:
        raise DataError(f"{name!r} is missing")
    return typed(row[name], name, kind)


def typed(value: Any, name: str, kind: type[T]) -> T:
    """The value. Raises DataError with its name if it is not of the kind, or half a character."""
    if not isinstance(value, kind):
        raise DataError(f"{name!r} is {_shown(value)}; it must be {_KINDS[kind]}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = ascii(value[error.start])
            raise DataError(f"{name!r} has {half} at {error.start + 1}, no character") from None
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else text[:37] + "..."


@contextmanager
def located(place: str) -> Iterator[None]:
    """Puts the place, "file:line", before what a DataError inside says."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
