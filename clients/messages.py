"""What a client sends and gets: request, chunks, statistics, result, error; no transport here."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import numpy as np


class MaswError(RuntimeError):
    """A request that failed, with the server's own message.

    `status` is the gRPC status name: "INVALID_ARGUMENT" (a bad input; the message names field and
    limit), "UNAVAILABLE" (no server, or it went away), "DEADLINE_EXCEEDED" (the client's timeout),
    "CANCELLED", "INTERNAL", … or "UNKNOWN" where the server sends a message without a status.
    """

    def __init__(self, status: str, message: str):
        super().__init__(f"{message} [{status}]")
        self.status = status
        self.message = message


@dataclass(frozen=True)
class GenerationRequest:
    """One request to the endpoint, field for field its inputs; None leaves the server's default.

    Exactly one of `text` and `ids` is given; the answer comes in the same form. The server owns
    the limits (lengths, ranges) and refuses what breaks them; here only what cannot be sent is
    refused. `num_draft_tokens` = 0 is plain decoding. Sampling is greedy without `temperature`,
    `top_k` and `top_p`. `time_limit` is the server's limit in seconds, not the client's timeout.
    `extra` holds further inputs by name as arrays without the batch dimension.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    max_tokens: int = 256
    stream: bool = True
    num_draft_tokens: int | None = None
    adaptive_draft: bool | None = None
    use_draft_logits: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop_words: tuple[str, ...] = ()
    end_id: int | None = None
    pad_id: int | None = None
    exclude_input_in_output: bool | None = None
    apply_chat_template: bool | None = None
    time_limit: float | None = None
    return_perf_metrics: bool = True
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self):
        if (self.text is None) == (self.ids is None):
            given = "neither" if self.text is None else "both"
            raise ValueError(f"exactly one of text and ids must be given, got {given}")
        if isinstance(self.stop_words, str):
            raise ValueError("stop_words is one string; give a tuple of strings")
        if self.ids is not None:
            object.__setattr__(self, "ids", tuple(int(token) for token in self.ids))
        object.__setattr__(self, "stop_words", tuple(self.stop_words))

    @property
    def greedy(self) -> bool:
        """Whether the server decodes this request greedily, so that its answer is one text."""
        given = (self.temperature, self.top_k, self.top_p)
        return self.temperature == 0 or self.top_k == 1 or given == (None, None, None)


@dataclass(frozen=True)
class Chunk:
    """What one response adds: new text (asked by text) or new ids (asked by ids).

    `tokens` is the number of tokens since the chunk before, None where the server does not say;
    `time_s` is the arrival, in seconds since the request was sent.
    """

    text: str
    ids: tuple[int, ...]
    tokens: int | None
    time_s: float


@dataclass(frozen=True)
class Statistics:
    """The server's account of one request; times in ms, `*_at` per draft position."""

    prefix_tokens: int
    new_tokens: int
    iterations: int
    drafted: int
    accepted: int
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    rollbacks: int
    slots_materialized: int
    slots_discarded: int
    prefill_ms: float
    draft_ms: float
    verify_ms: float
    host_ms: float
    draft_failures: int
    finish_reason: str

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the server's JSON object; unknown keys of a newer server are left out.

        Raises ValueError naming the key that is missing.
        """
        values = json.loads(text)
        missing = [item.name for item in fields(cls) if item.name not in values]
        if missing:
            raise ValueError(f"the server's statistics lack {', '.join(missing)}")
        known = {item.name: values[item.name] for item in fields(cls)}
        for name in ("drafted_at", "accepted_at"):
            known[name] = tuple(known[name])
        return cls(**known)

    @property
    def tok_per_iter(self) -> float:
        """Tokens per call of the target, its own token included; 1 without speculation."""
        return self.new_tokens / self.iterations if self.iterations else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens, the target's own tokens excluded; 0 when none was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Accepted / drafted at each draft position, up to the last one that was drafted."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return tuple(accepted / drafted for accepted, drafted in pairs if drafted)

    @property
    def decode_s(self) -> float:
        """Seconds of drafting, verification and host work, prefill excluded."""
        return (self.draft_ms + self.verify_ms + self.host_ms) / 1e3


@dataclass(frozen=True)
class GenerationResult:
    """A finished answer: the text or ids, when they arrived, and the server's statistics.

    `chunks` are the non-empty ones in order; `elapsed_s` is from sending to the final response.
    `server_ttft_s` is arrival to first token on the server's clock, where it reports it.
    """

    text: str
    ids: tuple[int, ...]
    streamed: bool
    chunks: tuple[Chunk, ...]
    elapsed_s: float
    statistics: Statistics | None = None
    server_ttft_s: float | None = None

    @property
    def new_tokens(self) -> int | None:
        """Tokens generated, by the server's count; None where it gives none (an ensemble)."""
        if self.statistics is not None:
            return self.statistics.new_tokens
        counts = [chunk.tokens for chunk in self.chunks]
        return None if None in counts else sum(counts)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token: at the client when streamed, else the server's own."""
        if not self.streamed:
            return self.server_ttft_s
        return self.chunks[0].time_s if self.chunks else None

    @property
    def time_per_output_token_s(self) -> float | None:
        """Seconds per token after the first chunk: (last - first arrival) / tokens in between.

        Tokens in between are all but those of the first chunk; where the server does not count
        them per chunk, all but one. Not streamed, or a single chunk: `Statistics.decode_s` over
        all tokens. None where nothing was measured.
        """
        tokens = self.new_tokens
        if not tokens:
            return None
        if self.streamed and len(self.chunks) > 1:
            first, last = self.chunks[0], self.chunks[-1]
            between = tokens - (first.tokens or 1)
            return (last.time_s - first.time_s) / between if between > 0 else None
        return self.statistics.decode_s / tokens or None if self.statistics else None

    @property
    def tok_s(self) -> float | None:
        """Decode rate in tokens per second, 1 / `time_per_output_token_s`: prefill excluded."""
        return 1 / self.time_per_output_token_s if self.time_per_output_token_s else None

    def summary(self) -> dict[str, Any]:
        """The numbers as a JSON object: rates, times in seconds, and the raw statistics."""
        numbers = {"new_tokens": self.new_tokens, "tok_s": self.tok_s, "ttft_s": self.ttft_s}
        numbers["elapsed_s"] = self.elapsed_s
        if self.statistics is not None:
            numbers |= {
                "prefix_tokens": self.statistics.prefix_tokens,
                "iterations": self.statistics.iterations,
                "tok_per_iter": self.statistics.tok_per_iter,
                "acceptance_rate": self.statistics.acceptance_rate,
                "acceptance_by_position": self.statistics.acceptance_by_position,
                "finish_reason": self.statistics.finish_reason,
                "statistics": asdict(self.statistics),
            }
        return {name: _rounded(value) for name, value in numbers.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) and math.isfinite(value) else value
