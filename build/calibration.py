"""The text on which a quantised model's scales are measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from ..engines.engine_folder import file_sha256
from .adaptor.sources import Source

SUFFIXES = (".jsonl", ".txt")
SAMPLES, LENGTH = 512, 512  # NVIDIA's numbers
_CHARACTERS_PER_TOKEN = 12  # more than any text of a document has


@dataclass(frozen=True)
class Calibration:
    """Text, and how much of it is read. samples: sequences; length: most tokens of each."""

    file: Path
    samples: int = SAMPLES
    length: int = LENGTH

    def __post_init__(self):
        for name in ("samples", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"calibration {name} is {getattr(self, name)}; use 1 or more")
        if self.file.suffix not in SUFFIXES:
            raise ValueError(
                f"calibration file is {self.file.name}; use a text file .txt, or .jsonl with lines "
                '{"text": ...}'
            )
        if not self.file.is_file():
            raise ValueError(f"calibration file {self.file} does not exist")

    def sequences(self, tokenizer: Any) -> list[list[int]]:
        """At most `samples` sequences of at most `length` ids, each document's start first.

        `tokenizer` is a Hugging Face tokenizer. Raises ValueError for a file without text.
        """
        texts = (text for text in Source("text", self.file).documents() if text.strip())
        pieces = [self._pieces(text, tokenizer) for text in islice(texts, self.samples)]
        rounds: Iterable[list[int] | None] = chain.from_iterable(zip_longest(*pieces))
        found = list(islice(filter(None, rounds), self.samples))
        if not found:
            raise ValueError(f"calibration file {self.file} holds no text")
        return found

    def _pieces(self, text: str, tokenizer: Any) -> list[list[int]]:
        text = text[: self.samples * self.length * _CHARACTERS_PER_TOKEN]
        ids = tokenizer(text)["input_ids"]
        return [ids[start : start + self.length] for start in range(0, len(ids), self.length)]

    def as_dict(self) -> dict[str, Any]:
        """For provenance: the file by name and digest, and how much of it was read."""
        return {
            "file": self.file.name,
            "sha256": file_sha256(self.file),
            "samples": self.samples,
            "length": self.length,
        }
