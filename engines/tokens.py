"""The tokens of a tokenizer.json by content: what draft and target must have in common.

Files of equal tokens differ in bytes: in their order, in settings of the text side, in templates.
Only ids pass between the models, so only what an id stands for counts.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.json"


class TokensError(ValueError):
    """A file that is no tokenizer.json."""


def read_tokens(path: Path) -> dict[int, str]:
    """Every token by its id, added ones included. Raises TokensError, OSError."""
    try:
        data = json.loads(path.read_text())
        tokens = {number: token for token, number in _pairs(data["model"]["vocab"])}
        added = {each["id"]: each["content"] for each in data.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError) as error:
        raise TokensError(f"{path} is no {TOKENIZER}: {error!r}") from None
    return tokens | added


def tokens_sha256(path: Path) -> str | None:
    """Hex digest of all ids with their tokens; None without the file. Raises TokensError."""
    if not path.is_file():
        return None
    text = json.dumps(sorted(read_tokens(path).items()))
    return hashlib.sha256(text.encode()).hexdigest()


def first_difference(target: dict[int, str], draft: dict[int, str]) -> str:
    """What differs at the lowest id; "" where all tokens are equal."""
    for number in sorted(target.keys() | draft.keys()):
        ours, theirs = target.get(number), draft.get(number)
        if ours != theirs:
            return f"token {number} is {ours!r} in the target and {theirs!r} in the draft"
    return ""


def _pairs(vocab: Any) -> list[tuple[str, int]]:
    """(token, id): a mapping, or a list of [token, score] in the order of ids."""
    if isinstance(vocab, dict):
        return list(vocab.items())
    return [(token, number) for number, (token, _) in enumerate(vocab)]
