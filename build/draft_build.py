"""`masw-build draft`: a Hugging Face model and its adaptor as a TensorRT engine folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..engines.adaptor import Adaptor
from ..engines.architectures import check_model_folder
from ..engines.decoder import Decoder
from ..engines.engine_folder import ENGINE, Builder, DraftEngine, file_sha256
from ..engines.tensorrt_module import check_name, load_tensorrt
from ..engines.tokens import TOKENIZER, tokens_sha256
from .bench.texts import MANUAL
from .calibration import Calibration
from .draft_plan import DraftPlan
from .network.attention import plugin_attention
from .network.draft import DraftNetwork, draft_network
from .network.quantized import QuantizedLinear
from .output_folder import is_used, staged, write_provenance
from .progress import Say

TIMING_CACHE = "timing.cache"
PLUGIN, NATIVE = "plugin", "native"  # the attention of an engine


def check_attention(module: str, attention: str) -> None:
    """Raises ValueError for an attention that the module of TensorRT cannot build."""
    check_name(module)
    if attention not in (PLUGIN, NATIVE):
        raise ValueError(f"attention is {attention!r}; use {PLUGIN} or {NATIVE}")
    if attention == PLUGIN and module != "tensorrt":
        raise ValueError(
            f"attention {PLUGIN} needs module tensorrt; {module} has no such plugins: use "
            f"--attention {NATIVE}"
        )


@dataclass(frozen=True)
class DraftBuild:
    """What is built of what, and with which module of TensorRT.

    calibration: text for a quantised draft; None: Python's own manual.
    """

    plan: DraftPlan
    model: Path
    out: Path
    adaptor: Path | None = None
    module: str = "tensorrt"
    attention: str = "plugin"
    calibration: Calibration | None = None

    def __post_init__(self):
        check_attention(self.module, self.attention)
        check_model_folder(self.model)
        if self.adaptor is not None and not self.adaptor.is_file():
            raise ValueError(f"adaptor {self.adaptor} does not exist")
        if self.plan.scheme is not None and not (self.model / TOKENIZER).is_file():
            raise ValueError(
                f"{self.model} has no {TOKENIZER}, which --quantization "
                f"{self.plan.quantization} needs for its calibration text"
            )
        if is_used(self.out):
            raise ValueError(f"{self.out} is not empty; give another --out or remove it")


def build_draft(build: DraftBuild, say: Say) -> Path:
    """Builds the engine folder; it appears whole or not at all.

    Raises ImportError with the remedy where TensorRT is missing, ValueError for what does not fit,
    before anything slow; EngineBuildError where TensorRT gives up.
    """
    trt = load_tensorrt(build.module)
    capability = _check_device(build)
    build.out.parent.mkdir(parents=True, exist_ok=True)  # takes the timing cache
    if build.plan.scheme is not None:
        build.plan.scheme.check_module(trt)
        build.plan.scheme.check_device(capability)
    say("reading weights")
    decoder = Decoder.load(build.model, dtype=None)  # the network converts
    base = decoder.fingerprint()
    adaptor = None
    if build.adaptor is not None:
        adaptor = Adaptor.load(build.adaptor, decoder.config, base)
    started = datetime.now(UTC)
    network = _describe(trt, build, decoder, adaptor, _quantize(build, say), say)
    plan_bytes = _serialize(trt, network, build.out.parent, say)
    engine = DraftEngine(
        model=build.plan.model,
        io=build.plan.io,
        draft_tokens=build.plan.draft_tokens,
        builder=Builder(build.module, trt.__version__, build.attention, capability),
        base=base,
        adaptor=file_sha256(build.adaptor),
        tokenizer=tokens_sha256(build.model / TOKENIZER),
        quantization=build.plan.quantization,
    )
    facts = {} if build.plan.scheme is None else {"calibration": _text(build)}
    with staged(build.out) as stage:
        (stage / ENGINE).write_bytes(plan_bytes)
        engine.write(stage)
        write_provenance(stage, started, engine_bytes=len(plan_bytes), **facts)
    return build.out


def _check_device(build: DraftBuild) -> str | None:
    """The compute capability to build for; refuses a GPU that cannot hold the draft."""
    if not torch.cuda.is_available():
        if build.module == "tensorrt":
            raise ValueError(
                "tensorrt builds for the GPU it runs on, and there is none; run the same command "
                "in the container on a machine with one, or plan with --dry-run"
            )
        return None
    free, _ = torch.cuda.mem_get_info()
    build.plan.check_device(free, torch.cuda.get_device_name())
    return ".".join(map(str, torch.cuda.get_device_capability()))


def _quantize(build: DraftBuild, say: Say) -> dict[str, QuantizedLinear]:
    plan = build.plan
    if plan.scheme is None:
        return {}
    from .draft_quantizer import quantize_draft

    name = MANUAL if build.calibration is None else build.calibration.file.name
    say(f"calibrating {plan.quantization} on {name}")
    return quantize_draft(build.model, plan.scheme, plan.io.dtype, build.calibration, say)


def _text(build: DraftBuild) -> str | dict[str, Any]:
    return MANUAL if build.calibration is None else build.calibration.as_dict()


def _describe(
    trt: ModuleType,
    build: DraftBuild,
    decoder: Decoder,
    adaptor: Adaptor | None,
    quantized: dict[str, QuantizedLinear],
    say: Say,
) -> DraftNetwork:
    say("describing the network")
    attention = None if build.attention == NATIVE else plugin_attention(_plugin_device())
    logger = trt.Logger(trt.Logger.WARNING)
    return draft_network(trt, logger, build.plan.io, decoder, adaptor, attention, quantized)


def _plugin_device() -> Any:
    """The GPU of this machine, as the plugins' kernels are cut for it."""
    from ..plugins.slot_attention.tensorrt import Device

    properties = torch.cuda.get_device_properties(0)
    return Device(
        sm=properties.major * 10 + properties.minor, programs=2 * properties.multi_processor_count
    )


def _serialize(trt: ModuleType, network: DraftNetwork, cache: Path, say: Say) -> bytes:
    config = network.builder_config()
    with _progress(trt) as monitor, _timing_cache(trt, config, cache):
        config.progress_monitor = monitor
        say("building the engine")
        return network.build(config)


@contextmanager
def _timing_cache(trt: ModuleType, config: Any, folder: Path) -> Iterator[None]:
    """Tactic timings kept beside the engines, so that a second build is quick (TensorRT only)."""
    if trt.__name__ != "tensorrt":  # TensorRT-RTX measures on the user's machine instead
        yield
        return
    path = folder / TIMING_CACHE
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    yield
    path.write_bytes(bytes(config.get_timing_cache().serialize()))


@contextmanager
def _progress(trt: ModuleType) -> Iterator[Any]:
    """A TensorRT progress monitor that draws one bar per phase on standard error."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        class Monitor(trt.IProgressMonitor):
            """Bars by the name of the phase."""

            def __init__(self):
                super().__init__()
                self.tasks: dict[str, TaskID] = {}

            def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int):
                self.tasks[phase_name] = bars.add_task(phase_name, total=num_steps)

            def step_complete(self, phase_name: str, step: int) -> bool:
                bars.update(self.tasks[phase_name], completed=step)
                return True

            def phase_finish(self, phase_name: str):
                bars.remove_task(self.tasks.pop(phase_name))

        yield Monitor()
