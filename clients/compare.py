"""Whether speculative decoding gave the answer of plain decoding, and how much faster."""

from dataclasses import dataclass
from typing import Any

from .messages import GenerationResult

_CONTEXT = 24  # characters or ids shown before and after the first difference


@dataclass(frozen=True)
class Difference:
    """Where two answers part: the index of the first differing character or id, and both sides."""

    index: int
    unit: str
    speculative: str
    plain: str

    def __str__(self) -> str:
        return (
            f"first difference at {self.unit} {self.index}: "
            f"speculative {self.speculative}, plain {self.plain}"
        )


@dataclass(frozen=True)
class Comparison:
    """The same request answered with drafting and by plain decoding (`num_draft_tokens` = 0)."""

    speculative: GenerationResult
    plain: GenerationResult

    @property
    def difference(self) -> Difference | None:
        """The first difference: by ids where both answers have them, else by text."""
        first, second = self.speculative, self.plain
        by_ids = bool(first.ids and second.ids)
        mine, other = (first.ids, second.ids) if by_ids else (first.text, second.text)
        index = first_difference(mine, other)
        if index is None:
            return None
        shown = [_around(sequence, index) for sequence in (mine, other)]
        return Difference(index, "token" if by_ids else "character", *shown)

    @property
    def equal(self) -> bool:
        """Whether the answers are identical."""
        return self.difference is None

    @property
    def speedup(self) -> float | None:
        """Decode rate of the speculative answer / that of the plain one; None where unknown."""
        mine, other = self.speculative.tok_s, self.plain.tok_s
        return mine / other if mine and other else None

    def summary(self) -> dict[str, Any]:
        """`equal`, `plain_tok_s`, `plain_ttft_s`, `speedup` and, if any, `difference` for JSON."""
        plain = self.plain.summary()
        numbers = {
            "equal": self.equal,
            "plain_tok_s": plain["tok_s"],
            "plain_ttft_s": plain["ttft_s"],
            "speedup": round(self.speedup, 4) if self.speedup else None,
        }
        return numbers | ({} if self.equal else {"difference": str(self.difference)})


def first_difference(mine: str | tuple, other: str | tuple) -> int | None:
    """The first index at which two sequences differ, their end included; None if equal."""
    for index, (left, right) in enumerate(zip(mine, other, strict=False)):
        if left != right:
            return index
    return None if len(mine) == len(other) else min(len(mine), len(other))


def _around(sequence: str | tuple, index: int) -> str:
    before = sequence[max(0, index - _CONTEXT) : index]
    after = sequence[index : index + _CONTEXT]
    if isinstance(sequence, str):
        return f"{before!r} → {after!r}" if after else f"{before!r} → end"
    return f"{list(before)} → {list(after) if after else 'end'}"
