"""Prompts that drafting meets: summaries of meetings, exact quotes from them, long texts to go on.

Every prompt has at most the wanted number of tokens, and nearly as many; no document gives one
twice. A random start takes the document from another place each time, so that one document gives
many different prefixes.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...engines.text import TextCodec
from .rows import document_prompt
from .samples import DataError, Sample, field_of, located, read_rows
from .sources import read_text

SUMMARY, QUOTE, CODE, TEXT = "summary", "quote", "code", "text"
GIVEN_WORDS = 8  # of a quoted turn, to begin with
LEAST_WORDS = 50  # of a turn that is worth quoting
_CHARACTERS_PER_TOKEN = 12  # more than any text of a document has


@dataclass(frozen=True)
class Meeting:
    """A transcript, one line per turn "speaker: words", and questions about it."""

    name: str
    lines: tuple[str, ...]
    questions: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole transcript."""
        return "\n".join(self.lines)

    def from_line(self, start: int) -> Meeting:
        """The meeting from line `start` on."""
        return Meeting(self.name, self.lines[start:], self.questions)


def read_meetings(path: Path) -> list[Meeting]:
    """Meetings of a QMSum-style JSON lines file. Raises DataError naming what is amiss, and where.

    A file without meetings is refused too.
    """
    meetings = []
    for row, place in read_rows(path):
        with located(f"{place}: no meeting"):
            meetings.append(_meeting(row))
    if not meetings:
        raise DataError(f"{path} holds no meetings")
    return meetings


def _meeting(row: dict) -> Meeting:
    return Meeting(
        field_of(row, "meeting_id", str),
        tuple(field_of(row, "transcript", str).split("\n")),
        tuple(field_of(query, "query", str) for query in field_of(row, "queries", list)),
    )


@dataclass(frozen=True)
class Opening:
    """Who speaks a turn, and its first words."""

    speaker: str
    words: str

    @classmethod
    def of(cls, line: str) -> Opening | None:
        """The opening of a line "speaker: words"; None for a line without either."""
        speaker, _, words = line.partition(":")
        if not speaker.strip() or not words.strip():
            return None
        return cls(speaker, " ".join(words.split()[:GIVEN_WORDS]))


class PromptMaker:
    """Draws prompts of one length from documents; the same ones for the same seed."""

    def __init__(self, codec: TextCodec, prefix: int, seed: int = 0, random_start: bool = False):
        self.codec, self.prefix, self.random_start = codec, prefix, random_start
        self.random = random.Random(f"{seed}:{prefix}")

    def summaries(self, meetings: Sequence[Meeting]) -> Iterator[Sample]:
        """A question about each meeting, in turn: another question every round."""
        asked: dict[tuple[str, ...], set[str]] = defaultdict(set)  # by the lines shown
        for round_ in range(max((len(meeting.questions) for meeting in meetings), default=0)):
            for meeting in meetings:
                cut = self._cut(meeting)
                if cut is None or not meeting.questions:
                    continue
                question = meeting.questions[round_ % len(meeting.questions)]
                if question not in asked[cut.lines]:
                    asked[cut.lines].add(question)
                    ids = document_prompt(self.codec, cut.text, question, self.prefix)
                    yield self._sample(ids, SUMMARY, meeting.name)

    def quotes(self, meetings: Sequence[Meeting]) -> Iterator[Sample]:
        """A distant turn of each meeting, whose first words are given, to be quoted exactly.

        Ends with a round in which no meeting has another.
        """
        quoted: dict[tuple[str, ...], set[Opening]] = defaultdict(set)  # by the lines shown
        while True:
            found = False
            for meeting in meetings:
                cut = self._cut(meeting)
                opening = None if cut is None else self._opening(cut, quoted[cut.lines])
                if opening is not None:
                    found = True
                    quoted[cut.lines].add(opening)
                    yield self._quote(cut, opening)
            if not found:
                return

    def continuations(self, texts: Sequence[tuple[str, str]], kind: str) -> Iterator[Sample]:
        """The beginning (or any part) of each named text, to be continued."""
        taken: set[tuple[int, ...]] = set()
        for name, text in texts:
            start = self._start(len(text))
            part = text[start : start + self.prefix * _CHARACTERS_PER_TOKEN]
            ids = self.codec.tokenizer(part, add_special_tokens=False)["input_ids"]
            begun = tuple(ids[: self.prefix])
            if len(begun) == self.prefix and begun not in taken:
                taken.add(begun)
                yield self._sample(begun, kind, name)

    def _sample(self, ids: Sequence[int], kind: str, name: str) -> Sample:
        return Sample(tuple(ids), kind=kind, prefix=self.prefix, name=name)

    def _start(self, length: int) -> int:
        least = self.prefix * 5  # characters that surely hold enough tokens
        if not self.random_start or length <= least:
            return 0
        return self.random.randrange(length - least)

    def _cut(self, meeting: Meeting) -> Meeting | None:
        """The meeting from its start or any line, as far as a prompt holds it; None: too short."""
        start, first = self._start(len(meeting.text)), 0
        while start > 0 and first < len(meeting.lines):
            start -= len(meeting.lines[first]) + 1
            first += 1
        rest = meeting.from_line(first)
        text = rest.text[: self.prefix * _CHARACTERS_PER_TOKEN]
        ids = self.codec.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < self.prefix:
            return None
        held = self.codec.decode(ids[: self.prefix])
        return Meeting(meeting.name, tuple(held.split("\n")), meeting.questions)

    def _opening(self, meeting: Meeting, quoted: set[Opening]) -> Opening | None:
        """Of a long turn that is neither among the first lines nor near the end, and not quoted."""
        count = len(meeting.lines)
        middle = meeting.lines[count // 10 : count * 8 // 10]
        long = [Opening.of(line) for line in middle if len(line.split()) >= LEAST_WORDS]
        left = [opening for opening in long if opening is not None and opening not in quoted]
        return self.random.choice(left) if left else None

    def _quote(self, meeting: Meeting, opening: Opening) -> Sample:
        question = (
            f"Repeat, word for word, the whole turn in which {opening.speaker.strip()} begins with "
            f'"{opening.words}".'
        )
        begun = f"{opening.speaker}: {opening.words}"
        ids = self.codec.tokenizer(begun, add_special_tokens=False)["input_ids"]
        prompt = document_prompt(self.codec, meeting.text, question, self.prefix - len(ids))
        return self._sample([*prompt, *ids], QUOTE, meeting.name)


def read_texts(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Files as (name, text) in the given order."""
    return [(path.name, read_text(path)) for path in paths]
