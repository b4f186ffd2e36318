"""`masw-train prompts` and `answers`: texts to train on and to evaluate with."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from ..engines.config import max_positions
from ..engines.engine_folder import file_sha256
from ..engines.pair import DTYPES
from ..engines.recipes import EMBEDDED
from ..engines.text import TextCodec
from .adaptor.journal import Journal
from .adaptor.prompts import CODE, QUOTE, SUMMARY, TEXT, PromptMaker, read_meetings, read_texts
from .adaptor.samples import DataError, Sample, read_samples, write_samples
from .bench.record import progress
from .options import new_file, numbers
from .target_folder import model_fingerprint
from .train_options import Device, Dtype, Model, Numbers, failures, model_folder, say

Out = Annotated[Path, typer.Argument(help="JSON lines file to write.", callback=new_file)]


def prompts(
    out: Out,
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
        folder, lengths = model_folder(model), numbers(prefixes)
        check_prefixes(lengths, max_positions(folder))
        codec, found = TextCodec(folder), []
        read = read_meetings(meetings) if meetings else []
        programs, texts = python_texts(code), read_texts(text or [])
        for prefix in lengths:
            maker = PromptMaker(codec, prefix, seed, random_start)
            kinds = {CODE: maker.continuations(programs, CODE)}
            if read:
                kinds |= {SUMMARY: maker.summaries(read), QUOTE: maker.quotes(read)}
            if texts:
                kinds[TEXT] = maker.continuations(texts, TEXT)
            for kind, drawn in kinds.items():
                needed = kind != CODE or code is not None
                found += first_of(drawn, count, f"{kind} prompts of {prefix} tokens", needed)
        if not found:
            raise DataError("no prompts: give longer documents, or smaller --prefixes")
        write_samples(out, found)
        say(f"{len(found)} prompts in {out}")


def check_prefixes(prefixes: Sequence[int], most: int | None) -> None:
    """Raises DataError for a length below 1 or above `most`, and for one that stands twice."""
    for place, prefix in enumerate(prefixes):
        if prefix < 1:
            raise DataError(f"prefixes has {prefix}; it must be 1 or more")
        if most is not None and prefix > most:
            raise DataError(f"prefixes has {prefix}; the model has {most} positions")
        if prefix in prefixes[:place]:
            raise DataError(f"prefixes has {prefix} twice; give each length once")


def first_of(drawn: Iterator[Sample], count: int, what: str, needed: bool) -> list[Sample]:
    """At most `count`; tells if there are fewer. Raises DataError if one is needed and none."""
    found = list(islice(drawn, count))
    if needed and not found:
        raise DataError(f"no {what}: give longer documents, or smaller --prefixes")
    if len(found) < count:
        say(f"{len(found)} of {count} {what}: no more were found")
    return found


def answers(
    prompts: Annotated[Path, typer.Argument(help="What `masw-train prompts` wrote.")],
    out: Out,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    model: Model = EMBEDDED,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Adds the model's own greedy answers to prompts: what drafts are compared with.

    Answers are kept in OUT.journal as they come, so that the same command resumes.
    """
    from .adaptor.answers import Answerer

    with failures():
        samples, folder = read_samples(prompts), model_folder(model)
        belongs = {"prompts": file_sha256(prompts), "model": model_fingerprint(folder)}
        belongs |= {"max_tokens": max_tokens, "dtype": dtype}
        kept = out.with_name(out.name + ".journal")
        answerer = Answerer(folder, DTYPES[dtype], device)
        answerer.check(samples, max_tokens)
        with closing(Journal(kept, belongs, alone=True)) as journal:
            done = len(journal.rows)
            with progress(-(-(len(samples) - done) // batch_size)) as tick:
                for batch in answerer.run(samples, max_tokens, batch_size, done):
                    for sample in batch:
                        journal.append(asdict(sample))
                    tick(f"{len(journal.rows)} of {len(samples)} answers")
            write_samples(out, (Sample(**row) for row in journal.rows))
            kept.unlink()


def python_texts(folder: Path | None) -> list[tuple[str, str]]:
    """Python files of a folder, or the standard library's, as (name, text).

    Tells which are left out, as no UTF-8.
    """
    if folder is not None and not folder.is_dir():
        raise DataError(f"code is {folder}; it must be a folder of Python files")
    found = []
    for path in standard_library() if folder is None else sorted(folder.rglob("*.py")):
        try:
            found += read_texts([path])
        except DataError as error:
            say(f"left out: {error}")
    return found


def standard_library() -> list[Path]:
    """Python's own modules in an order that does not follow their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in folder.glob("*.py") if not path.name.startswith("_")]
    return sorted(files, key=lambda path: hashlib.sha256(path.name.encode()).hexdigest())
