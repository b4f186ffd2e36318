"""Outcomes of draft memories added up: Tok./Iter and acceptance by kind of text and prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...engines.sequence import Statistics
from .evaluation import DraftMemory, Evaluator, KeptOutcomes, Outcome
from .family import families
from .samples import Sample


def count_iterations(hits: Sequence[bool], draft_tokens: int, max_tokens: int) -> Statistics:
    """What the running loop counts on an answer with these hits.

    draft_tokens γ; max_tokens the request's limit, which clips the last drafts. An answer shorter
    than max_tokens ended with an end id.
    """
    statistics, done = Statistics(), 0
    while done < len(hits):
        drafted = min(draft_tokens, max_tokens - done - 1)
        if drafted < 1:
            left = len(hits) - done
            statistics.observe(0, 0, left)
            break
        accepted = 0
        while accepted < drafted and done + accepted < len(hits) and hits[done + accepted]:
            accepted += 1
        new = min(accepted + 1, len(hits) - done)
        statistics.observe(drafted, min(accepted, new), new)
        done += new
    return statistics


@dataclass(frozen=True)
class Summary:
    """Totals over samples of one kind, prefix and memory.

    tok_iter: tokens per iteration over all samples. by_position: share of drafted tokens accepted,
    by place in the draft. each: (tokens, iterations) of every sample. nll, kl: per bucket of tokens
    beyond the window, nats per token.
    """

    kind: str
    prefix: int
    memory: str
    samples: int
    entries: int
    tokens: int
    iterations: int
    tok_iter: float
    by_position: tuple[float, ...]
    each: tuple[tuple[int, int], ...]
    nll: dict[int, float]
    kl: dict[int, float]


def summarise(
    kind: str,
    prefix: int,
    memory: DraftMemory,
    outcomes: Sequence[Outcome],
    draft_tokens: int,
    max_tokens: int,
) -> Summary:
    """Adds up outcomes of one kind and prefix."""
    counts = [count_iterations(outcome.hits, draft_tokens, max_tokens) for outcome in outcomes]
    tokens, iterations = sum(c.new_tokens for c in counts), sum(c.iterations for c in counts)
    drafted = _by_place([c.drafted_at for c in counts], draft_tokens)
    accepted = _by_place([c.accepted_at for c in counts], draft_tokens)
    totals: dict[int, Counter] = {}
    for outcome in outcomes:
        for bucket, (count, nll, kl) in outcome.distance.items():
            totals.setdefault(bucket, Counter()).update(count=count, nll=nll, kl=kl)
    return Summary(
        kind=kind,
        prefix=prefix,
        memory=memory.name,
        samples=len(outcomes),
        entries=memory.entries(prefix),
        tokens=tokens,
        iterations=iterations,
        tok_iter=tokens / iterations,
        by_position=tuple(a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)),
        each=tuple((c.new_tokens, c.iterations) for c in counts),
        nll={bucket: c["nll"] / c["count"] for bucket, c in sorted(totals.items())},
        kl={bucket: c["kl"] / c["count"] for bucket, c in sorted(totals.items())},
    )


def summaries(
    evaluator: Evaluator | KeptOutcomes,
    samples: Sequence[Sample],
    memories: Callable[[int], Sequence[DraftMemory]],
    draft_tokens: int,
    max_tokens: int,
    tick: Callable[[str], None] = lambda text: None,
) -> list[Summary]:
    """Runs `memories(prefix)` over every sample; one summary per prefix, kind and memory."""
    found = []
    for prefix in sorted({sample.prefix for sample in samples}):
        group, compared = [s for s in samples if s.prefix == prefix], memories(prefix)
        outcomes: dict[Sample, dict[str, Outcome]] = {}
        for family in families(group):
            told = evaluator.run(family, compared)
            for sample, outcome in zip(family.samples, told, strict=True):
                outcomes[sample] = outcome
                tick(f"{sample.kind} at {prefix}")
        for kind in sorted({sample.kind for sample in group}):
            of_kind = [outcomes[sample] for sample in group if sample.kind == kind]
            found += [
                summarise(kind, prefix, m, [o[m.name] for o in of_kind], draft_tokens, max_tokens)
                for m in compared
            ]
    return found


def _by_place(counts: Sequence[Sequence[int]], places: int) -> list[int]:
    """Sums of lists of at most `places` numbers each."""
    return [sum(c[i] for c in counts if i < len(c)) for i in range(places)]
