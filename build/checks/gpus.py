"""Devices: there, and of an architecture that runs the recipe's numbers."""

from __future__ import annotations

from ...engines.recipe import Recipe
from ..quantization import QUANTIZATIONS
from .finding import Finding, failed, judged, ok, unknown
from .subject import Subject

ABSENT = "no NVIDIA driver here"


def gpu_findings(subject: Subject) -> list[Finding]:
    """Whether the recipe's devices exist and are new enough for target and draft."""
    recipe, machine = subject.recipe, subject.machine
    used = sorted({*recipe.target.gpus, recipe.draft.gpu})
    if machine.gpus is None:
        return [unknown("GPUs", f"{ABSENT}; the recipe uses {used}"), _unknown_architecture(recipe)]
    missing = [index for index in used if machine.gpu(index) is None]
    if missing:
        found = f"{len(machine.gpus)} GPUs, none numbered {', '.join(map(str, missing))}"
        remedy = "change target.gpus and draft.gpu, or give the container more GPUs (--gpus all)"
        return [failed("GPUs", found, remedy)]
    names = ", ".join(sorted({machine.gpu(index).name for index in used}))
    present = ok("GPUs", f"{used}: {names}")
    return [present, *(_architecture(subject, *role) for role in _roles(recipe))]


def _roles(recipe: Recipe) -> list[tuple[str, tuple[int, ...], int]]:
    """(role, devices, SM needed)."""
    cache = "fp8" if recipe.target.kv_cache == "fp8" else "none"
    target = max(QUANTIZATIONS[kind].sm for kind in (recipe.target.quantization, cache))
    return [
        ("target", recipe.target.gpus, target),
        ("draft", (recipe.draft.gpu,), QUANTIZATIONS[recipe.draft.quantization].sm),
    ]


def _unknown_architecture(recipe: Recipe) -> Finding:
    needed = ", ".join(f"{role} SM{sm}" for role, _, sm in _roles(recipe))
    return unknown("GPU architecture", f"{ABSENT}; needed: {needed} or newer")


def _architecture(subject: Subject, role: str, gpus: tuple[int, ...], needed: int) -> Finding:
    oldest = min((subject.machine.gpu(index) for index in gpus), key=lambda gpu: gpu.sm)
    part = subject.recipe.target if role == "target" else subject.recipe.draft
    found = f"{oldest.name} is SM{oldest.sm}; quantization {part.quantization} needs SM{needed}"
    remedy = f"set {role}.quantization (and kv_cache) to what SM{oldest.sm} has, or use newer GPUs"
    return judged(f"GPU architecture: {role}", oldest.sm >= needed, found, remedy)
