"""What the measurements read: meetings from a QMSum file, or Python's own manual."""

from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...engines.pair import Pair
from ...engines.text import TextCodec
from ..fitting import fit_prompt
from .record import BenchError

QUERY = "Summarise the text above in a few sentences."
MANUAL = "pydoc_data.topics"
_CHARACTERS_PER_TOKEN = 12  # more than any text of a document has


@dataclass(frozen=True)
class Document:
    """A long text and what is asked of it."""

    name: str
    text: str
    query: str


def read_documents(path: Path | None) -> Iterator[Document]:
    """The meetings of a QMSum-style JSONL file with their first query; None: the manual.

    A line holds {"meeting_id", "transcript", "queries": [{"query", "answer"}, ...]}.
    """
    if path is None:
        yield from _manual()
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _meeting(line, f"{path}:{number}")


def _meeting(line: str, place: str) -> Document:
    try:
        item = json.loads(line)
        query = item["queries"][0]["query"] if item["queries"] else QUERY
        return Document(str(item["meeting_id"]), item["transcript"], query)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BenchError(
            f"{place}: no meeting ({type(error).__name__}: {error}); a line holds meeting_id, "
            "transcript and queries, each with a query"
        ) from None


def _manual() -> Iterator[Document]:
    """The manual's topics in order, each document starting at another one."""
    topics = pydoc_data.topics.topics
    names = sorted(topics)
    for place in dict.fromkeys(7 * number % len(names) for number in range(len(names))):
        order = names[place:] + names[:place]
        yield Document(order[0], "\n\n".join(topics[name] for name in order), QUERY)


def fingerprint(path: Path | None) -> str:
    """What was read: the manual's name, or a file's name and the start of its SHA-256."""
    if path is None:
        return MANUAL
    with path.open("rb") as file:
        return f"{path.name} sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"


def plain_ids(codec: TextCodec, length: int) -> list[int]:
    """The first `length` tokens of the manual."""
    text = next(_manual()).text
    ids: list[int] = []
    while len(ids) < length:
        ids += codec.tokenizer(text[: length * _CHARACTERS_PER_TOKEN], add_special_tokens=False)[
            "input_ids"
        ]
    return ids[:length]


def check_length(prefix: int, new_tokens: int, pair: Pair) -> None:
    """Raises ValueError for a prefix that is none, or too long for the pair."""
    if prefix < 1:
        raise ValueError(f"prefix is {prefix}; it must be 1 or more")
    if prefix + new_tokens > pair.max_length:
        raise ValueError(
            f"prefix is {prefix} with {new_tokens} new tokens; the pair's max_length is "
            f"{pair.max_length}"
        )


@dataclass(frozen=True)
class Prompt:
    """A document cut to a prefix length and its query, as text and as ids."""

    name: str
    text: str
    ids: tuple[int, ...]


def build_prompt(codec: TextCodec, document: Document, length: int) -> Prompt | None:
    """Document and query in at most `length` tokens, nearly exactly; None if it is too short."""
    start = document.text[: length * _CHARACTERS_PER_TOKEN]
    prompt = fit_prompt(codec, start, document.query, length)
    if prompt is None or prompt.whole:
        return None
    return Prompt(document.name, prompt.text, prompt.ids)


def build_prompts(codec: TextCodec, path: Path | None, length: int, wanted: int) -> list[Prompt]:
    """One prompt of `length` tokens from each of the first documents that are long enough."""
    prompts: list[Prompt] = []
    for document in read_documents(path):
        prompt = build_prompt(codec, document, length)
        prompts += [prompt] if prompt else []
        if len(prompts) == wanted:
            return prompts
    raise BenchError(
        f"{path or 'the manual'} has {len(prompts)} documents of {length} tokens or more, {wanted} "
        "are wanted; use fewer --prompts or shorter --prefixes, with room for the question"
    )
