"""What speculation will bring, from latencies measured one by one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

WORTHWHILE = 1.1


@dataclass(frozen=True)
class Latencies:
    """Times in milliseconds at the prefix length and batch size of interest.

    draft: one step of the draft. verify: one call of the target with draft_tokens tokens to check.
    accepted: draft tokens kept per iteration, on average. decode: one plain step of the target;
    None takes `verify`, which holds where memory bandwidth bounds both.
    """

    draft: float
    verify: float
    accepted: float
    draft_tokens: int
    decode: float | None = None

    def __post_init__(self):
        for name in ("draft", "verify", "draft_tokens"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give a finite number above 0")
        if self.decode is not None and not 0 < self.decode < inf:
            raise ValueError(f"decode is {self.decode}; give finite milliseconds above 0")
        if not 0 <= self.accepted <= self.draft_tokens:
            raise ValueError(
                f"accepted is {self.accepted}; of {self.draft_tokens} draft tokens 0 to "
                f"{self.draft_tokens} can be kept"
            )

    @property
    def plain(self) -> float:
        """Milliseconds of one token without speculation."""
        return self.verify if self.decode is None else self.decode

    @property
    def iteration(self) -> float:
        """Milliseconds of one iteration: all draft steps and the verification."""
        return self.draft_tokens * self.draft + self.verify

    @property
    def speedup(self) -> float:
        """Tokens per time with speculation over those without."""
        return (self.accepted + 1) * self.plain / self.iteration

    @property
    def break_even(self) -> float:
        """Accepted tokens per iteration at which speculation is as fast as plain decoding."""
        return self.iteration / self.plain - 1

    @property
    def warning(self) -> str | None:
        """What to do where it is hardly worth it; None otherwise."""
        if self.speedup >= WORTHWHILE:
            return None
        share = self.draft_tokens * self.draft / self.iteration
        return (
            f"predicted speedup {self.speedup:.2f}x is below {WORTHWHILE}x: drafting takes "
            f"{share:.0%} of an iteration, {self.break_even:.1f} accepted tokens break even; use a "
            "smaller or quantized draft, fewer draft tokens, or a GPU of its own for the draft"
        )
