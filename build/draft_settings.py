"""What `masw-build draft` builds: from a recipe, with single values given on top."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engines import architectures
from ..engines.adaptor import check_adaptor, read_header
from ..engines.config import DecoderConfig
from ..engines.draft_io import DraftIO
from ..engines.places import Places
from ..engines.recipe import MOST, Lane, Recipe
from ..plugins.slot_attention.rule import MemoryRule, SlotVisibility
from .calibration import Calibration
from .draft_build import NATIVE, PLUGIN, DraftBuild, build_draft, check_attention
from .draft_plan import DraftPlan
from .draft_scheme import NONE


@dataclass(frozen=True)
class DraftSettings:
    """Everything a draft engine depends on. Lengths in tokens; memory as in `MemoryRule`.

    model: Hugging Face folder, or a known architecture's name where only a plan is wanted.
    memory: where a recipe states it; an adaptor must be made for it. draft_tokens: the largest γ;
    None: R. attention: None: the plugin for tensorrt, native for tensorrt_rtx.
    """

    model: str | None = None
    out: Path | None = None
    adaptor: Path | None = None
    architecture: str | None = None
    sink: int = 128
    window: int = 128
    interval: int = 8
    visibility: str = "evicted"
    rollback: int = 16
    draft_tokens: int | None = None
    max_sequences: int = 8
    max_length: int = 32_768
    chunk: int = 512
    dtype: str = "bfloat16"
    quantization: str = NONE
    calibration: Path | None = None
    module: str = "tensorrt"
    attention: str | None = None
    logits: bool = True
    memory: MemoryRule | None = None

    @classmethod
    def of(cls, recipe: Recipe, root: Path) -> DraftSettings:
        """What a gpu recipe states; its files lie below `root`.

        Raises ValueError for a recipe of the cpu lane.
        """
        if recipe.lane != Lane.GPU:
            raise ValueError(
                f"recipe {recipe.name} has lane {recipe.lane}; only lane gpu compiles its draft"
            )
        memory, limits, draft, places = recipe.memory, recipe.limits, recipe.draft, Places(root)
        return cls(
            model=str(places.draft_model),
            out=places.draft_engine,
            adaptor=places.adaptor if memory.interval else None,
            architecture=draft.architecture,
            sink=memory.sink,
            window=memory.window,
            interval=memory.interval,
            visibility=memory.visibility,
            rollback=memory.rollback,
            draft_tokens=limits.max_draft_tokens,
            max_sequences=limits.max_sequences,
            max_length=limits.max_length,
            chunk=limits.chunk,
            dtype=draft.dtype,
            quantization=draft.quantization,
            memory=memory,
        )

    def change(self, given: dict[str, Any]) -> DraftSettings:
        """These settings with others on top."""
        changed = replace(self, **given)
        if self.memory is None:
            changed._check_memory(given)
            return changed
        if not changed.interval and "adaptor" not in given:
            changed = replace(changed, adaptor=None)
        return replace(changed, memory=changed._stated)

    def plan(self, dry_run: bool) -> DraftPlan:
        """Shapes and sizes. dry_run: files that do not exist are done without."""
        if self.model is None:
            raise ValueError("give MODEL, or --recipe")
        check_attention(self.module, self._attention)
        self._check_sizes()
        rule, config = self._rule(dry_run), self._config(dry_run)
        if self.adaptor is not None and self.adaptor.is_file():
            check_adaptor(self.adaptor, config)
        sizes = {name: getattr(self, name) for name in ("max_sequences", "max_length", "chunk")}
        io = DraftIO.of(config, rule, **sizes, dtype=self.dtype, logits=self.logits)
        most = rule.rollback if self.draft_tokens is None else self.draft_tokens
        return DraftPlan(config, io, most, self.quantization)

    def build(self, plan: DraftPlan, say: Callable[[str], None]) -> Path:
        """Builds the engine; see `build_draft`."""
        if self.out is None:
            raise ValueError("give --out, the engine folder to make, or --dry-run")
        if self.adaptor is None and plan.io.rule.interval:
            raise ValueError(
                f"slots with r = {plan.io.rule.interval} need --adaptor (or --interval 0)"
            )
        how = self.module, self._attention, self._text(plan)
        return build_draft(DraftBuild(plan, Path(self.model), self.out, self.adaptor, *how), say)

    def _check_sizes(self) -> None:
        """The limits that recipes have."""
        for name in ("sink", "window", "interval", "rollback", "max_sequences", "chunk"):
            if getattr(self, name) > MOST:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {MOST} or less")

    def _check_memory(self, given: dict[str, Any]) -> None:
        """Refuses what is given beside an adaptor whose header says otherwise."""
        if self.adaptor is None:
            return
        header = read_header(self.adaptor)
        for name in ("sink", "window", "interval", "visibility"):
            if name in given and given[name] != getattr(header, name):
                raise ValueError(
                    f"{name} is {given[name]}, but adaptor {self.adaptor} is for "
                    f"{getattr(header, name)}; leave --{name} out"
                )

    @property
    def _attention(self) -> str:
        return self.attention or (PLUGIN if self.module == "tensorrt" else NATIVE)

    def _text(self, plan: DraftPlan) -> Calibration | None:
        if self.calibration is None:
            return None
        if plan.scheme is None:
            raise ValueError("calibration is given; only --quantization fp8 or int4_awq reads it")
        return Calibration(self.calibration, plan.scheme.samples, plan.scheme.length)

    @property
    def _stated(self) -> MemoryRule:
        visibility = SlotVisibility(self.visibility)
        return MemoryRule(self.sink, self.window, self.rollback, self.interval, visibility)

    def _rule(self, dry_run: bool) -> MemoryRule:
        """The adaptor's, where there is one."""
        if self.adaptor is None or (dry_run and self.memory and not self.adaptor.is_file()):
            return self._stated
        found = read_header(self.adaptor).rule(self.rollback)
        if self.memory is not None and found != self.memory:
            raise ValueError(
                f"adaptor {self.adaptor} is for {found}, the recipe states {self.memory}; give the "
                "adaptor that was trained for it"
            )
        return found

    def _config(self, dry_run: bool) -> DecoderConfig:
        """The architecture of a folder, or a known one by name where only a plan is wanted."""
        folder = Path(self.model)
        if folder.is_dir():
            architectures.check_model_folder(folder)
            if self.architecture is not None:
                return architectures.check_folder(self.architecture, folder)
            return DecoderConfig.load(folder)
        if dry_run:
            return architectures.architecture(self.architecture or self.model)
        raise ValueError(f"{self.model} is no folder; a build needs the model's weights")
