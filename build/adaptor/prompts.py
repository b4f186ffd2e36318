"""Prompts that drafting meets: summaries of meetings, exact quotes from them, long texts to go on.

Every prompt has at most the wanted number of tokens, and nearly as many. A random start takes the
document from another place each time, so that one document gives many different prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...engines.text import TextCodec
from .rows import document_prompt
from .samples import Sample, read_rows

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
    """Meetings of a QMSum-style JSON lines file."""
    return [
        Meeting(
            row["meeting_id"],
            tuple(row["transcript"].split("\n")),
            tuple(query["query"] for query in row["queries"]),
        )
        for row, _ in read_rows(path)
    ]


class PromptMaker:
    """Draws prompts of one length from documents; the same ones for the same seed."""

    def __init__(self, codec: TextCodec, prefix: int, seed: int = 0, random_start: bool = False):
        self.codec, self.prefix, self.random_start = codec, prefix, random_start
        self.random = random.Random(f"{seed}:{prefix}")

    def summaries(self, meetings: Sequence[Meeting]) -> Iterator[Sample]:
        """A question about each meeting, in turn: another question every round."""
        for round_ in range(max(len(meeting.questions) for meeting in meetings)):
            for meeting in meetings:
                cut = self._cut(meeting)
                if cut is not None and meeting.questions:
                    question = meeting.questions[round_ % len(meeting.questions)]
                    ids = document_prompt(self.codec, cut.text, question, self.prefix)
                    yield self._sample(ids, SUMMARY, meeting.name)

    def quotes(self, meetings: Sequence[Meeting]) -> Iterator[Sample]:
        """A distant turn of each meeting, whose first words are given, to be quoted exactly."""
        while True:
            found = False
            for meeting in meetings:
                cut = self._cut(meeting)
                turn = None if cut is None else self._turn(cut)
                if turn is not None:
                    found = True
                    yield self._quote(cut, turn)
            if not found:
                return

    def continuations(self, texts: Sequence[tuple[str, str]], kind: str) -> Iterator[Sample]:
        """The beginning (or any part) of each named text, to be continued."""
        for name, text in texts:
            start = self._start(len(text))
            part = text[start : start + self.prefix * _CHARACTERS_PER_TOKEN]
            ids = self.codec.tokenizer(part, add_special_tokens=False)["input_ids"]
            if len(ids) >= self.prefix:
                yield self._sample(ids[: self.prefix], kind, name)

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

    def _turn(self, meeting: Meeting) -> int | None:
        """A long turn that is neither among the first lines nor near the end."""
        count = len(meeting.lines)
        middle = range(count // 10, count * 8 // 10)
        long = [i for i in middle if len(meeting.lines[i].split()) >= LEAST_WORDS]
        return self.random.choice(long) if long else None

    def _quote(self, meeting: Meeting, turn: int) -> Sample:
        speaker, _, words = meeting.lines[turn].partition(":")
        given = " ".join(words.split()[:GIVEN_WORDS])
        question = (
            f"Repeat, word for word, the whole turn in which {speaker.strip()} begins with "
            f'"{given}".'
        )
        opening = self.codec.tokenizer(f"{speaker}: {given}", add_special_tokens=False)["input_ids"]
        room = self.prefix - len(opening)
        ids = document_prompt(self.codec, meeting.text, question, room)
        return self._sample([*ids, *opening], QUOTE, meeting.name)


def read_texts(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Files as (name, text) in the given order."""
    return [(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in paths]
