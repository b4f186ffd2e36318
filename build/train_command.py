"""`masw-train pretrain` and `sft`: the stages of training an adaptor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..engines.recipes import EMBEDDED
from .adaptor.run import Run, train
from .adaptor.settings import Initialisation, Loss, TrainSettings
from .adaptor.sources import Source
from .options import numbers
from .train_options import Device, Dtype, Model, Numbers, failures, model_folder, say

Data = Annotated[
    list[str],
    typer.Option(help="NAME or NAME=PATH, repeatable; see masw.build.adaptor.sources."),
]
Out = Annotated[Path, typer.Option(help="Folder of the run; the same one resumes it.")]


def stage_command(tuning: bool, summary: str) -> Callable[..., None]:
    """`pretrain` or `sft`, which differ in the rows they make of the data."""

    def command(
        data: Data,
        out: Out,
        model: Model = EMBEDDED,
        target: Annotated[Path | None, typer.Option(help="Teacher of loss kl-target.")] = None,
        start: Annotated[Path | None, typer.Option(help="Adaptor to go on from.")] = None,
        intervals: Numbers = "8",
        sink: int = 128,
        window: int = 128,
        visibility: Annotated[str, typer.Option(help="evicted or materialized.")] = "evicted",
        slot_embedding: Annotated[str, typer.Option(help="last_token or an id.")] = "last_token",
        offset: Annotated[bool, typer.Option(help="Train a vector added to slots.")] = False,
        low_rank: Annotated[int, typer.Option(help="Rank of query and output updates.")] = 0,
        initialisation: Initialisation = Initialisation.COPY,
        loss: Loss = Loss.SELF,
        next_token: Annotated[float, typer.Option(help="Share of the next-token loss.")] = 0.0,
        prompt_weight: Annotated[float, typer.Option(help="0 masks the loss to answers.")] = 1.0,
        lengths: Numbers = "2048",
        batch_tokens: int = 8192,
        micro_tokens: int = 2048,
        steps: int = 200,
        learning_rate: float = 1e-3,
        warmup: int = 10,
        weight_decay: float = 0.0,
        clip: float = 1.0,
        dtype: Dtype = "bfloat16",
        recompute: Annotated[bool, typer.Option(help="Gradient checkpointing.")] = False,
        seed: int = 0,
        device: Device = "cpu",
        save_every: Annotated[int, typer.Option(min=1)] = 50,
        tensorboard: bool = False,
    ) -> None:
        with failures():
            embedding = slot_embedding if not slot_embedding.isdecimal() else int(slot_embedding)
            settings = TrainSettings(
                intervals=numbers(intervals),
                sink=sink,
                window=window,
                visibility=visibility,
                slot_embedding=embedding,
                offset=offset,
                low_rank=low_rank,
                initialisation=initialisation,
                loss=loss,
                next_token=next_token,
                prompt_weight=prompt_weight,
                lengths=numbers(lengths),
                batch_tokens=batch_tokens,
                micro_tokens=micro_tokens,
                steps=steps,
                learning_rate=learning_rate,
                warmup=warmup,
                weight_decay=weight_decay,
                clip=clip,
                dtype=dtype,
                recompute=recompute,
                seed=seed,
            )
            run = Run(
                model=model_folder(model),
                sources=[Source.parse(text) for text in data],
                out=out,
                tuning=tuning,
                settings=settings,
                device=device,
                start=start,
                target=target,
                save_every=save_every,
                tensorboard=tensorboard,
            )
            for path in train(run, say):
                typer.echo(str(path))

    command.__doc__ = summary
    return command


pretrain = stage_command(False, "Trains on documents packed to length, an end id after each.")
sft = stage_command(True, "Trains on questions and answers, or on ready-made samples.")
