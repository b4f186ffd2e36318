"""Training and evaluation samples: token ids of a prompt and of its answer."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path


class DataError(ValueError):
    """Data that cannot be used; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer as ids. kind: what sort of text; prefix: nominal prompt length."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    kind: str = ""
    prefix: int = 0
    name: str = ""

    def __post_init__(self):
        object.__setattr__(self, "prompt", tuple(self.prompt))
        object.__setattr__(self, "answer", tuple(self.answer))
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
    """Writes samples as JSON lines, atomically; compressed if the name ends in .gz."""
    part = path.with_name(path.name + ".part")
    with (gzip.open if path.suffix == ".gz" else open)(part, "wt", encoding="utf-8") as file:
        file.writelines(
            json.dumps(asdict(sample), separators=(",", ":")) + "\n" for sample in samples
        )
    part.replace(path)


def read_samples(path: Path) -> list[Sample]:
    """Reads what `write_samples` wrote. Raises DataError naming file and line."""
    return [_sample(row, place) for row, place in read_rows(path)]


def _sample(row: dict, place: str) -> Sample:
    try:
        return Sample(**row)
    except TypeError as error:
        raise DataError(f"{place}: no sample of prompt and answer ids: {error}") from None


def read_rows(path: Path) -> Iterator[tuple[dict, str]]:
    """The objects of a JSON lines file (.gz: compressed) with their places "file:line"."""
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{place}: no JSON: {error}") from None
                if not isinstance(row, dict):
                    raise DataError(f"{place}: a line holds one JSON object")
                yield row, place
