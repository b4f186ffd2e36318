"""Where training text comes from: data sets by name, local files, ready-made samples.

A source is written NAME or NAME=PATH. NAME is a data set below; with a PATH its rows are read from
a local JSON lines file instead of the hub. Three names need a PATH: `text` (a text file, or JSON
lines with "text"), `ids` (a .npy array of token ids) and `samples` (what `masw-train answers`
writes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .samples import DataError, read_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """A document, what is asked about it, and the answer."""

    document: str
    question: str
    answer: str


@dataclass(frozen=True)
class DataSet:
    """How rows of a data set become plain documents and exchanges.

    hub: its identifier; config: its configuration there, if any.
    """

    hub: str
    document: Callable[[Row], str]
    exchanges: Callable[[Row], list[Exchange]]
    config: str | None = None


def _summary(document: str, summary: str, kind: str) -> Callable[[Row], list[Exchange]]:
    question = f"Summarise this {kind}."
    return lambda row: [Exchange(row[document], question, row[summary])]


def _meeting(row: Row) -> list[Exchange]:
    return [Exchange(row["transcript"], q["query"], q["answer"]) for q in row["queries"]]


DATA_SETS = {
    "redpajama": DataSet(
        "togethercomputer/RedPajama-Data-1T-Sample", lambda row: row["text"], lambda row: []
    ),
    "longalpaca": DataSet(
        "Yukang/LongAlpaca-12k",
        lambda row: f"{row['instruction']}\n\n{row['output']}",
        lambda row: [Exchange("", row["instruction"], row["output"])],
    ),
    "booksum": DataSet(
        "kmfoda/booksum", lambda row: row["chapter"], _summary("chapter", "summary_text", "chapter")
    ),
    "qmsum": DataSet("", lambda row: row["transcript"], _meeting),
    "govreport": DataSet(
        "ccdv/govreport-summarization",
        lambda row: row["report"],
        _summary("report", "summary", "report"),
    ),
    "multinews": DataSet(
        "alexfabbri/multi_news",
        lambda row: row["document"],
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
            try:
                yield convert(row)
            except (KeyError, TypeError) as error:
                raise DataError(f"{place}: no row of {self.name}: {error!r} is missing") from None

    def _rows(self) -> Iterator[tuple[Row, str]]:
        if self.path is not None:
            yield from read_rows(self.path)
            return
        from datasets import load_dataset

        known = DATA_SETS[self.name]
        rows = load_dataset(known.hub, known.config, split="train", streaming=True)
        for number, row in enumerate(rows):
            yield row, f"{known.hub} row {number}"


def _texts(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8", errors="replace")
        return
    for row, place in read_rows(path):
        if not isinstance(row.get("text"), str):
            raise DataError(f'{place}: a line holds {{"text": ...}}')
        yield row["text"]
