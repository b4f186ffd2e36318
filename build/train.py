"""`masw-train`: prompts and answers to train on, the memory adaptor itself, and what it is worth.

Exit codes: 0 done, 1 could not be done, 2 a usage error.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from ..engines.decoder import Decoder
from ..engines.engine_folder import file_sha256
from ..engines.pair import DTYPES
from ..engines.recipes import EMBEDDED
from ..engines.text import TextCodec
from .adaptor import comparison as comparing
from .adaptor.ablation import Laboratory, read_arms
from .adaptor.journal import Journal
from .adaptor.prompts import CODE, TEXT, PromptMaker, read_meetings, read_texts
from .adaptor.run import Run, train
from .adaptor.samples import Sample, read_samples, write_samples
from .adaptor.settings import Initialisation, Loss, TrainSettings
from .adaptor.sources import Source
from .bench.record import emit, progress
from .embedded_pair import embedded_model
from .options import numbers
from .target_folder import model_fingerprint

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

Model = Annotated[str, typer.Option(help="'embedded' or a Hugging Face model folder.")]
Device = Annotated[str, typer.Option(help="'cpu' or 'cuda'.")]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Numbers = Annotated[str, typer.Option(help="Whole numbers separated by commas.")]
Data = Annotated[
    list[str],
    typer.Option(help="NAME or NAME=PATH, repeatable; see masw.build.adaptor.sources."),
]
Out = Annotated[Path, typer.Option(help="Folder of the run; the same one resumes it.")]


def say(text: str) -> None:
    """Tells a person what is happening."""
    typer.echo(text, err=True)


@contextmanager
def failures() -> Iterator[None]:
    """What keeps a command from being done ends it with one line and code 1."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        typer.echo(f"masw-train: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("masw-train: interrupted; the same command resumes", err=True)
        raise typer.Exit(130) from None


def tuples_of(text: str, form: str) -> tuple[tuple[int, ...], ...]:
    """Numbers in a form such as W:r, several of these separated by commas."""
    found = [numbers(part.replace(":", ",")) for part in text.split(",") if part.strip()]
    if any(len(entry) != len(form.split(":")) for entry in found):
        raise typer.BadParameter(f"{text!r}: give {form}, several separated by commas")
    return tuple(found)


def model_folder(model: str) -> Path:
    """The folder of a model; the embedded one is made on first use."""
    return embedded_model(say) if model == EMBEDDED else Path(model)


def standard_library() -> list[Path]:
    """Python's own modules in an order that does not follow their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in folder.glob("*.py") if not path.name.startswith("_")]
    return sorted(files, key=lambda path: hashlib.sha256(path.name.encode()).hexdigest())


@app.command()
def prompts(
    out: Annotated[Path, typer.Argument(help="JSON lines file to write.")],
    meetings: Annotated[Path | None, typer.Option(help="QMSum-style JSONL.")] = None,
    code: Annotated[
        Path | None, typer.Option(help="Folder of Python files; default the standard library.")
    ] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Plain text file, repeatable.")] = None,
    prefixes: Numbers = "2048,4096",
    count: Annotated[int, typer.Option(min=1, help="Prompts per kind and prefix.")] = 8,
    random_start: Annotated[bool, typer.Option(help="Cut documents at random places.")] = False,
    seed: int = 0,
    model: Model = EMBEDDED,
) -> None:
    """Writes prompts: summaries and exact quotes of meetings, continuations of code and text."""
    with failures():
        codec, found = TextCodec(model_folder(model)), []
        read = read_meetings(meetings) if meetings else []
        if code is not None and not code.is_dir():
            raise ValueError(f"code is {code}; it must be a folder of Python files")
        files = standard_library() if code is None else sorted(code.rglob("*.py"))
        for prefix in numbers(prefixes):
            maker = PromptMaker(codec, prefix, seed, random_start)
            kinds = [maker.continuations(read_texts(files), CODE)]
            kinds += [maker.summaries(read), maker.quotes(read)] if read else []
            kinds += [maker.continuations(read_texts(text), TEXT)] if text else []
            for kind in kinds:
                found += islice(kind, count)
        write_samples(out, found)
        say(f"{len(found)} prompts in {out}")


@app.command()
def answers(
    prompts: Annotated[Path, typer.Argument(help="What `masw-train prompts` wrote.")],
    out: Annotated[Path, typer.Argument(help="JSON lines file to write.")],
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    model: Model = EMBEDDED,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Adds the model's own greedy answers to prompts: what drafts are compared with.

    Answers are kept in OUT.journal as they come, so that the same command resumes.
    """
    from .adaptor.answers import Answerer, by_length

    with failures():
        order, folder = by_length(read_samples(prompts)), model_folder(model)
        belongs = {"prompts": file_sha256(prompts), "model": model_fingerprint(folder)}
        belongs |= {"max_tokens": max_tokens, "dtype": dtype}
        journal = Journal(out.with_name(out.name + ".journal"), belongs)
        left = order[len(journal.rows) :]
        answerer = Answerer(folder, DTYPES[dtype], device)
        with progress(-(-len(left) // batch_size)) as tick:
            for batch in answerer.run(left, max_tokens, batch_size):
                for sample in batch:
                    journal.append(asdict(sample))
                tick(f"{len(journal.rows)} of {len(order)} answers")
        write_samples(out, (Sample(**row) for row in journal.rows))
        journal.path.unlink()


def training_command(name: str, tuning: bool, summary: str) -> None:
    """Registers `pretrain` or `sft`, which differ in the rows they make of the data."""

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
            embedding = slot_embedding if not slot_embedding.isdigit() else int(slot_embedding)
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
    app.command(name)(command)


training_command("pretrain", False, "Trains on documents packed to length, an end id after each.")
training_command("sft", True, "Trains on questions and answers, or on ready-made samples.")


@app.command()
def evaluate(
    samples: Annotated[Path, typer.Argument(help="What `masw-train answers` wrote.")],
    adaptor: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE of a trained adaptor, repeatable.")
    ] = None,
    transferred: Annotated[
        str, typer.Option(help="S:W:r of memories to try every adaptor in as it is.")
    ] = "",
    untrained: Annotated[str, typer.Option(help="W:r of untrained copies.")] = "128:8",
    equal: Annotated[
        str, typer.Option(help="Windows with as many entries as slots of these intervals.")
    ] = "8,4",
    windows: Annotated[str, typer.Option(help="Further windows, by entries.")] = "",
    swa: Annotated[str, typer.Option(help="Sliding windows without a sink.")] = "1024",
    snapkv: Annotated[bool, typer.Option(help="SnapKV, one eighth of the prefix.")] = True,
    sink: Annotated[int, typer.Option(help="Sink of windows and untrained copies.")] = 128,
    draft_tokens: Annotated[int, typer.Option(min=1)] = 5,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    per_kind: Annotated[int, typer.Option(help="Samples per kind and prefix; 0 = all.")] = 0,
    prefixes: Annotated[str, typer.Option(help="Only these prefixes; none = all.")] = "",
    distances: Annotated[bool, typer.Option(help="NLL and KL by distance as well.")] = True,
    outcomes: Annotated[
        Path | None, typer.Option(help="File of samples' outcomes; those in it are not made again.")
    ] = None,
    model: Model = EMBEDDED,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Tok./Iter of draft memories, exact for greedy decoding, from one forward each."""
    with failures():
        named = [text.partition("=") for text in adaptor or []]
        comparison = comparing.Comparison(
            adaptors={name: Path(path) for name, _, path in named},
            transferred=tuples_of(transferred, "S:W:r"),
            untrained=tuples_of(untrained, "W:r"),
            equal=numbers(equal, least=0),
            windows=numbers(windows, least=0),
            swa=numbers(swa, least=0),
            snapkv=snapkv,
            sink=sink,
            draft_tokens=draft_tokens,
            max_tokens=max_tokens,
        )
        decoder = Decoder.load(model_folder(model), DTYPES[dtype], device)
        chosen = comparing.first_of_each(
            read_samples(samples), per_kind, numbers(prefixes, least=0)
        )
        with progress(len(chosen)) as tick:
            summaries = comparing.compare(comparison, decoder, chosen, tick, distances, outcomes)
        record = comparing.record(comparison, dtype, device, summaries)
        emit(record, comparing.card(summaries), json_file)


@app.command()
def ablate(
    samples: Annotated[Path, typer.Argument(help="What `masw-train answers` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder of results; those in it are not made again.")],
    sft_data: Annotated[list[str], typer.Option(help="Data of stage sft, NAME=PATH.")],
    pretrain_data: Annotated[list[str], typer.Option(help="Data of stage pretrain.")],
    groups: Annotated[str, typer.Option(help="Groups of arms by comma; none = all.")] = "",
    lengths: Numbers = "2304",
    batch_tokens: int = 9216,
    micro_tokens: int = 2304,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps per arm.")] = 60,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    per_kind: Annotated[int, typer.Option(help="Samples per kind and prefix.")] = 8,
    prefixes: Annotated[str, typer.Option(help="Only these prefixes; none = all.")] = "",
    model: Model = EMBEDDED,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
) -> None:
    """Trains and evaluates the arms of build/adaptor/ablations.yaml, briefly each."""
    with failures():
        base = {
            "lengths": numbers(lengths),
            "batch_tokens": batch_tokens,
            "micro_tokens": micro_tokens,
            "steps": steps,
            "dtype": dtype,
        }
        arms = read_arms(base, tuple(g.strip() for g in groups.split(",") if g.strip()))
        laboratory = Laboratory(
            model_folder(model),
            [Source.parse(text) for text in pretrain_data],
            [Source.parse(text) for text in sft_data],
            comparing.first_of_each(read_samples(samples), per_kind, numbers(prefixes, least=0)),
            device,
            max_tokens=max_tokens,
        )
        for result in laboratory.run(arms, out, say):
            typer.echo(f"{result['group']}: {result['name']}: {result['tok_iter']}")


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(help="Folder with evaluate*.json and ablations/.")],
    out: Annotated[Path, typer.Argument(help="Folder of the PNG files.")],
) -> None:
    """Draws the pictures of committed results."""
    with failures():
        from .adaptor.plots import draw_all, read_results

        for path in draw_all(read_results(results / "ablations"), read_results(results), out):
            typer.echo(str(path))


if __name__ == "__main__":
    app()
