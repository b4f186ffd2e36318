"""Pictures of committed results: training curves, ablations, and the frontier of draft memories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .arms import curve_steps, read_arms

SIZE = (6.4, 3.6)  # inches
BARS = {
    "visibility": "slot visibility",
    "embedding": "slot embedding",
    "loss": "loss",
    "stage": "training stages",
    "levers": "levers",
    "window": "S and W, r = 8",
    "factorial": "W and r",
    "length": "training length",
}

Results = list[dict[str, Any]]


def read_results(folder: Path, pattern: str, keys: Sequence[str]) -> Results:
    """The JSON objects of a folder's files of a pattern, by file name.

    keys: what they are drawn from. Raises ValueError naming a file that lacks one.
    """
    return [_result(path, keys) for path in sorted(folder.glob(pattern))]


def _result(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    try:
        result = dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        result = {}
    for key in keys:
        if not result.get(key):
            raise ValueError(f"{path} has no {key}; make it again or move it away")
    return result


def draw_all(ablations: Results, evaluations: Results, out: Path) -> list[Path]:
    """Every picture that the results allow, as PNG files of `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    groups: dict[str, Results] = {}
    for result in in_order(ablations):
        groups.setdefault(result["group"], []).append(result)
    drawn = []
    if len(groups.get("initialisation", ())) > 1:
        drawn.append(_save(draw_initialisation, groups["initialisation"], out / "initialisation"))
    for group, title in BARS.items():
        if len(groups.get(group, ())) > 1:
            drawn.append(_save(draw_bars, groups[group], out / group, title))
    for (prefix, prompts), rows in sorted(_widest(evaluations).items()):
        drawn.append(_save(draw_frontier, rows, out / f"frontier-{prefix}-{prompts}", prefix))
    if any(row["kl"] for e in evaluations for row in e["rows"]):
        rows = [row for e in evaluations for row in e["rows"]]
        drawn.append(_save(draw_distance, rows, out / "distance"))
    return drawn


def in_order(ablations: Results) -> Results:
    """Results as their arms are in ablations.yaml, others behind them."""
    places = {(arm.group, arm.name): place for place, arm in enumerate(read_arms({}))}
    return sorted(ablations, key=lambda r: places.get((r["group"], r["name"]), len(places)))


def _widest(evaluations: Results) -> dict[tuple[int, int], list[dict]]:
    """By prefix and number of prompts: the rows of the evaluation that compares the most memories
    there, so that all points of a picture have the same samples."""
    widest: dict[tuple[int, int], list[dict]] = {}
    for evaluation in evaluations:
        for prefix in {row["prefix"] for row in evaluation["rows"]}:
            rows = [row for row in evaluation["rows"] if row["prefix"] == prefix]
            key = prefix, _prompts(rows)
            widest[key] = max(widest.get(key, []), rows, key=len)
    return widest


def _prompts(rows: Iterable[dict]) -> int:
    return sum({row["kind"]: row["samples"] for row in rows}.values())


def _save(draw, data, path: Path, *more) -> Path:
    figure = draw(data, *more)
    path = path.with_suffix(".png")
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return path


def draw_initialisation(results: Results):
    """Loss and gradient norm over steps, one line per arm (the paper's Figure 6)."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, key, label in zip(
        axes, ("loss", "gradient_norm"), ("loss, nats", "gradient norm"), strict=True
    ):
        for result in results:
            steps = curve_steps(result["settings"]["steps"], len(result["stages"]))
            axis.plot(steps, result[key], label=result["name"])
        _label(axis, "optimiser step", label)
        axis.set_yscale("log")
    return figure


def draw_bars(results: Results, title: str):
    """Tok./Iter of every arm at every prefix, means over kinds; a gap where an arm has none."""
    figure, axis = plt.subplots(figsize=SIZE)
    rows = [row for result in results for row in _by_memory(result)]
    prefixes = sorted({prefix for _, values in rows for prefix in values}, key=int)
    height = 1 / (len(prefixes) + 1)
    for number, prefix in enumerate(prefixes):
        found = {
            place + number * height: values[prefix]
            for place, (_, values) in enumerate(rows)
            if prefix in values
        }
        bars = axis.barh([*found], [*found.values()], height, label=f"{prefix} tokens")
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axis.set_yticks([place + (len(prefixes) - 1) / 2 * height for place in range(len(rows))])
    axis.set_yticklabels([name for name, _ in rows])
    axis.invert_yaxis()
    axis.set_title(title)
    axis.set_xlim(0, 6)
    _label(axis, "Tok./Iter", None)
    return figure


def _by_memory(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """An arm's name, with the memory's where it has several, and Tok./Iter by prefix."""
    found: dict[str, dict[str, float]] = {}
    for prefix, named in result["tok_iter"].items():
        for memory, value in named.items():
            found.setdefault(memory, {})[prefix] = value
    for memory, values in found.items():
        yield result["name"] if len(found) == 1 else f"{result['name']}, {memory}", values


def draw_frontier(rows: Sequence[dict], prefix: int):
    """Tok./Iter against memory entries: windows, and slots untrained and trained."""
    figure, axis = plt.subplots(figsize=SIZE)
    points = _means(rows)
    full = points.pop("full", None)
    kinds = {
        "sink + window": ("window", "o-"),
        "slots, untrained": ("untrained", "s"),
        "SnapKV": ("snapkv", "x"),
        "sliding window": ("swa", "+"),
        "slots, trained for another memory": (r".* S\d+ W\d+ r\d+$", "p"),
        "slots, trained": ("", "*"),  # adaptors have names of their own
    }
    for label, (pattern, style) in kinds.items():
        found = sorted(points.pop(name) for name in list(points) if re.match(pattern, name))
        if found:
            size = 13 if style == "*" else 7
            axis.plot(*zip(*found, strict=True), style, label=label, markersize=size)
    if full is not None:
        axis.axhline(full[1], color="grey", linestyle=":", label="full KV")
    axis.set_title(f"prefix of {prefix} tokens, {_prompts(rows)} prompts")
    _label(axis, "memory entries per layer", "Tok./Iter")
    return figure


def _means(rows: Iterable[dict]) -> dict[str, tuple[int, float]]:
    """(entries, mean Tok./Iter over kinds) by memory."""
    named: dict[str, list[dict]] = {}
    for row in rows:
        named.setdefault(row["memory"], []).append(row)
    return {
        name: (found[0]["entries"], mean(row["tok_iter"] for row in found))
        for name, found in named.items()
    }


def draw_distance(rows: Sequence[dict]):
    """Divergence from full KV by distance beyond the window, one line per memory."""
    figure, axis = plt.subplots(figsize=SIZE)
    longest = max(row["prefix"] for row in rows if row["kl"])
    sums: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["prefix"] == longest:
            for bucket, value in row["kl"].items():
                sums.setdefault(row["memory"], {}).setdefault(int(bucket), []).append(value)
    for name, buckets in sums.items():
        places = sorted(buckets)
        axis.plot(places, [mean(buckets[place]) for place in places], label=name)
    _label(axis, "tokens beyond the window", "KL to full KV, nats")
    return figure


def _label(axis: Axes, x: str, y: str | None) -> None:
    axis.set_xlabel(x)
    if y is not None:
        axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
