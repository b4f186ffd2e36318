"""Where training text comes from: data sets by name, local files, ready-made samples.

A source is written NAME or NAME=PATH. NAME is a data set below; with a PATH its rows are read from
a local JSON lines file instead of the hub. Three names need a PATH: `text` (a text file, or JSON
lines with "text": .json or .jsonl), `ids` (a .npy array of token ids) and `samples` (what
`masw-train answers` writes). Text and JSON lines may be compressed (.gz).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engines.engine_folder import file_sha256
from .samples import DataError, field_of, located, read_lines, read_rows

Row = dict[str, Any]
_JSON_LINES = (".jsonl", ".json")
# What LongAlpaca writes between a paper or book and what it asks about it.
_MATERIAL_ENDS = re.compile(r"\s*Now the (?:second )?(?:paper|material|book) ends\.\s*")


@dataclass(frozen=True)
class Exchange:
    """A document, what is asked about it, and the answer."""

    document: str
    question: str
    answer: str


@dataclass(frozen=True)
class DataSet:
    """How rows of a data set, `hub` on the hub, become plain documents and exchanges."""

    hub: str
    document: Callable[[Row], str]
    exchanges: Callable[[Row], list[Exchange]]


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: field_of(row, name, str)


def _summary(document: str, summary: str, kind: str) -> Callable[[Row], list[Exchange]]:
    question = f"Summarise this {kind}."
    document_of, summary_of = _text(document), _text(summary)
    return lambda row: [Exchange(document_of(row), question, summary_of(row))]


def _meeting(row: Row) -> list[Exchange]:
    transcript = field_of(row, "transcript", str)
    return [
        Exchange(transcript, field_of(query, "query", str), field_of(query, "answer", str))
        for query in field_of(row, "queries", list)
    ]


def _instruction(row: Row) -> tuple[str, str]:
    """Document and question of a LongAlpaca row.

    The question follows the sentence that ends the material, or is the instruction about an input,
    or the instruction's last line.
    """
    instruction = field_of(row, "instruction", str)
    ends = [*_MATERIAL_ENDS.finditer(instruction)]
    if ends:
        return instruction[: ends[-1].start()], instruction[ends[-1].end() :].strip()
    if row.get("input"):
        return field_of(row, "input", str), instruction
    document, _, question = instruction.rstrip().rpartition("\n")
    return document.rstrip(), question


def _instructed(row: Row) -> list[Exchange]:
    return [Exchange(*_instruction(row), field_of(row, "output", str))]


DATA_SETS = {
    "redpajama": DataSet(
        "liang2kl/RedPajama-Data-1T-Sample-Backup",  # as parquet; the original needs a script
        _text("text"),
        lambda row: [],
    ),
    "longalpaca": DataSet(
        "Yukang/LongAlpaca-12k",
        lambda row: f"{field_of(row, 'instruction', str)}\n\n{field_of(row, 'output', str)}",
        _instructed,
    ),
    "booksum": DataSet(
        "kmfoda/booksum", _text("chapter"), _summary("chapter", "summary_text", "chapter")
    ),
    "qmsum": DataSet("", _text("transcript"), _meeting),
    "govreport": DataSet(
        "ccdv/govreport-summarization", _text("report"), _summary("report", "summary", "report")
    ),
    "multinews": DataSet(
        "Awesome075/multi_news_parquet",  # the original needs a script
        _text("document"),
        _summary("document", "summary", "collection of news"),
    ),
}
LOCAL = ("text", "ids", "samples")


@dataclass(frozen=True)
class Source:
    """A data set by name, or a local file to be read as one."""

    name: str
    path: Path | None = None

    def __post_init__(self):
        if self.name not in DATA_SETS and self.name not in LOCAL:
            known = ", ".join([*DATA_SETS, *LOCAL])
            raise DataError(f"data is {self.name!r}; known: {known}")
        if self.path is None and (self.name in LOCAL or not DATA_SETS[self.name].hub):
            raise DataError(f"data {self.name!r} needs a file: {self.name}=PATH")
        if self.path is not None and not self.path.is_file():
            raise DataError(f"data {self.name}={self.path}: the file does not exist")

    @classmethod
    def parse(cls, text: str) -> Source:
        """Reads NAME or NAME=PATH."""
        name, _, path = text.partition("=")
        return cls(name, Path(path) if path else None)

    def __str__(self) -> str:
        return self.name if self.path is None else f"{self.name}={self.path.name}"

    def documents(self) -> Iterator[str]:
        """The plain texts of the source."""
        if self.name == "text":
            yield from _texts(self.path)
        else:
            yield from self._read(DATA_SETS[self.name].document)

    def exchanges(self) -> Iterator[Exchange]:
        """The questions and answers of the source."""
        if self.name in LOCAL:
            raise DataError(f"data {self.name!r} has no questions and answers; use samples")
        for found in self._read(DATA_SETS[self.name].exchanges):
            yield from found

    def _read(self, convert: Callable[[Row], Any]) -> Iterator[Any]:
        for row, place in self._rows():
            with located(f"{place}: no row of {self.name}"):
                converted = convert(row)
            yield converted

    def _rows(self) -> Iterator[tuple[Row, str]]:
        if self.path is not None:
            yield from read_rows(self.path)
            return
        hub = DATA_SETS[self.name].hub
        try:
            for number, row in enumerate(self._load(hub)):
                yield row, f"{hub} row {number}"
        except (OSError, RuntimeError) as error:
            raise DataError(f"{hub} cannot be read ({error}); try again, {self._local}") from None

    @property
    def _local(self) -> str:
        return f"or give {self.name}=PATH, JSON lines with the same fields"

    def _load(self, hub: str) -> Any:
        try:
            from datasets import load_dataset
        except ModuleNotFoundError:
            raise DataError(
                f"data {self.name!r} by name needs the package datasets: pip install datasets, "
                f"{self._local}"
            ) from None
        try:
            return load_dataset(hub, split="train", streaming=True)
        except ValueError as error:
            raise DataError(f"{hub} has changed ({error}); {self._local[3:]}") from None


def read_text(path: Path) -> str:
    """A text file (.gz: compressed). Raises DataError for one that is no UTF-8."""
    return "".join(line for line, _ in read_lines(path))


def _texts(path: Path) -> Iterator[str]:
    if not path.name.removesuffix(".gz").endswith(_JSON_LINES):
        yield read_text(path)
        return
    for row, place in read_rows(path):
        with located(f'{place}: a line holds {{"text": ...}}'):
            text = field_of(row, "text", str)
        yield text


def digests(sources: Sequence[Source]) -> list[list[str | None]]:
    """Name and SHA-256 of every source; None for what the hub holds, known by name only."""
    return [[str(source), file_sha256(source.path)] for source in sources]
