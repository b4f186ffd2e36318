"""`masw-build target`: the TensorRT-LLM target of a gpu recipe."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..engines import architectures
from ..engines.places import Places
from ..engines.recipe import load_recipe
from ..engines.trtllm_module import CONTAINER
from .bench.record import new_card
from .calibration import LENGTH, SAMPLES, Calibration
from .failures import cleaned_up, failures
from .output_folder import GIB, is_used
from .progress import Say
from .quantization import QUANTIZATIONS
from .target_build import EngineJob, build_engine
from .target_checkpoint import CheckpointJob, write_checkpoint
from .target_folder import check_checkpoint
from .target_plan import TargetPlan
from .target_tensors import RankTensor

WIDTH = 110  # columns that the longest row takes
AWQ_SAMPLES = QUANTIZATIONS["int4_awq"].samples


def target(
    recipe: Annotated[str, typer.Argument(help="A gpu recipe: a shipped name or a YAML file.")],
    root: Annotated[Path, typer.Option(help="Folder of models, checkpoints and engines.")] = Path(
        "."
    ),
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face folder; default ROOT/models/target.")
    ] = None,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Print config, shapes, bytes and command only.")
    ] = False,
    checkpoint_only: Annotated[
        bool, typer.Option("--checkpoint-only", help="Stop once the checkpoint is written.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Ranks built at once; default all.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Text to measure scales on: .txt, or .jsonl with text.")
    ] = None,
    calibration_samples: Annotated[
        int | None, typer.Option(help=f"Sequences read; {SAMPLES}, {AWQ_SAMPLES} for int4_awq.")
    ] = None,
    calibration_length: Annotated[int, typer.Option(help="Most tokens of a sequence.")] = LENGTH,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Builds the target's checkpoint and engines, or says what they will be (--config-only)."""
    with failures("masw-build"), cleaned_up():
        plan = TargetPlan(load_recipe(recipe))
        text = None
        if calibration is not None:
            if not plan.needs_calibration:
                raise ValueError(
                    f"calibration is given; target.quantization {plan.target.quantization} "
                    "measures nothing: leave it out"
                )
            count = QUANTIZATIONS[plan.target.quantization].samples
            samples = count if calibration_samples is None else calibration_samples
            text = Calibration(calibration, samples, calibration_length)
        build = TargetBuild.of(plan, root, model, workers, text)
        if config_only:
            if model is not None:
                architectures.check_folder(plan.target.architecture, model)
            _show(build, as_json)
            return
        stream = sys.stderr  # what ModelOpt prints goes elsewhere meanwhile
        build.run(checkpoint_only, lambda line: typer.echo(line, file=stream))
        _report(build, checkpoint_only, as_json)


@dataclass(frozen=True)
class TargetBuild:
    """The two steps of a build and where they write."""

    checkpoint: CheckpointJob
    engine: EngineJob

    @classmethod
    def of(
        cls,
        plan: TargetPlan,
        root: Path,
        model: Path | None = None,
        workers: int | None = None,
        calibration: Calibration | None = None,
    ) -> TargetBuild:
        """The jobs with the folders of a root."""
        places = Places(root)
        log = places.logs / "target-checkpoint.log"
        folder, out = model or places.target_model, places.checkpoint
        first = CheckpointJob(plan, folder, out, log, calibration)
        log = places.logs / "target-engine.log"
        return cls(first, EngineJob(plan, out, places.target_engine, log, workers))

    def run(self, checkpoint_only: bool, say: Say) -> None:
        """Checks both steps, then does them; a checkpoint that fits is used again."""
        done = is_used(self.checkpoint.out)
        if done:
            job = self.checkpoint
            check_checkpoint(job.plan, job.out, job.model, job.calibration)
        else:
            self.checkpoint.check()
        if not checkpoint_only:
            self.engine.check(0 if done else self.engine.plan.checkpoint_bytes)
        if done:
            say(f"using the checkpoint {self.checkpoint.out}")
        else:
            write_checkpoint(self.checkpoint, say)
        if not checkpoint_only:
            build_engine(self.engine, say)


def _report(build: TargetBuild, checkpoint_only: bool, as_json: bool) -> None:
    made = build.checkpoint.out if checkpoint_only else build.engine.out
    if as_json:
        named = {"checkpoint": str(build.checkpoint.out), "command": build.engine.command}
        typer.echo(json.dumps(named | ({} if checkpoint_only else {"engine": str(made)})))
        return
    typer.echo(str(made))


def _show(build: TargetBuild, as_json: bool) -> None:
    plan, command = build.engine.plan, build.engine.command
    if as_json:
        typer.echo(json.dumps(plan.as_dict() | {"command": command}))
        return
    typer.echo(json.dumps(plan.config, indent=2))
    console = Console(highlight=False, width=max(WIDTH, Console().width))
    console.print(tensor_card(plan))
    console.print(rank_card(plan))
    console.print(
        f"checkpoint {plan.checkpoint_bytes / GIB:,.2f} GiB; keys and values of a token "
        f"{plan.kv_bytes_per_token / 1024:,.0f} KiB on each GPU",
        markup=False,
    )
    typer.echo(f"in the container {CONTAINER}:\n{shlex.join(command)}")


def tensor_card(plan: TargetPlan) -> Table:
    """The tensors of a rank: those of a layer once, then those of the first and last stage."""
    card = new_card("tensors of one rank", ("tensor", "dtype", "shape", "MiB", "ranks"))
    shards, stages = plan.shards, plan.target.pipeline_parallel
    for tensor in shards.layer(0):
        name = f"layers.0–{shards.layers - 1}.{tensor.name.split('.', 3)[3]}"
        _add_tensor(card, name, tensor, "all")
    for tensor in shards.first_stage:
        _add_tensor(card, tensor.name, tensor, "all" if stages == 1 else "PP 0")
    for tensor in shards.last_stage:
        _add_tensor(card, tensor.name, tensor, "all" if stages == 1 else f"PP {stages - 1}")
    return card


def _add_tensor(card: Table, name: str, tensor: RankTensor, ranks: str) -> None:
    shape = " × ".join(map(str, tensor.shape)) or "scalar"
    name = name.removeprefix("transformer.")
    card.add_row(name, tensor.dtype, shape, f"{tensor.bytes / 2**20:,.2f}", ranks)


def rank_card(plan: TargetPlan) -> Table:
    """Every rank: its GPU, place, layers of the model, and bytes of weights."""
    card = new_card("ranks", ("rank", "GPU", "TP", "PP", "layers", "GiB"))
    layers, tensor = plan.shards.layers, plan.target.tensor_parallel
    for rank in range(plan.target.ranks):
        stage = plan.shards.stage(rank)
        held = f"{stage * layers}–{(stage + 1) * layers - 1}"
        size = f"{plan.rank_bytes(rank) / GIB:,.2f}"
        card.add_row(
            str(rank), str(plan.target.gpus[rank]), str(rank % tensor), str(stage), held, size
        )
    return card
