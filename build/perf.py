"""`masw-perf`: draft steps, speed beside Hugging Face, and load on a server, measured.

Every command prints a card and, as its last line, one JSON object; progress goes to standard
error. Exit codes: 0 measured, 1 could not be measured, 2 a usage error, 3 an output differed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..clients.client import DEFAULT_URL
from ..engines.recipes import EMBEDDED
from .bench.record import emit, progress
from .failures import failures
from .options import new_file, numbers, words
from .serve import prepare

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

Recipe = Annotated[str, typer.Option(help="'embedded' or the path of a prepared pair.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the JSON object to this file as well.", callback=new_file),
]
Quantization = Annotated[
    str | None,
    typer.Option(help="Of the draft: none or int8.", show_default="what the pair states"),
]
Threads = Annotated[
    int, typer.Option(min=0, max=1024, help="Compute threads; 0 = torch's own choice.")
]
Documents = Annotated[
    Path | None,
    typer.Option(
        help="QMSum-style JSONL with meeting_id, transcript and queries.",
        show_default="Python's own manual",
        exists=True,
        dir_okay=False,
    ),
]


@contextmanager
def usage() -> Iterator[None]:
    """Settings that refuse a value are a usage error."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def draft_step(
    recipe: Recipe = EMBEDDED,
    prefixes: Annotated[
        str, typer.Option(help="Prefix lengths, separated by commas.")
    ] = "512,1024,2048,4096,8000",
    interval: Annotated[str, typer.Option(help="Slot intervals r to measure.")] = "8,4",
    rounds: Annotated[int, typer.Option(help="Interleaved repeats; medians are given.")] = 9,
    steps: Annotated[int, typer.Option(help="Draft steps per repeat.")] = 16,
    shape: Annotated[
        str | None,
        typer.Option(
            help="llama-3.2-3b or llama-3.1-8b: random weights of that shape instead of a "
            "recipe's draft; full KV then uses torch's own attention.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; cuda needs --shape.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of random weights.")] = "bfloat16",
    draft_quantization: Quantization = None,
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Time of a draft step, memory and prefill time by prefix, for slots, window and full KV.

    On CUDA a step is also measured as a CUDA graph, without the host's work.
    """
    from .bench import draft_step as bench
    from .bench.step_report import steps_card, steps_record

    with failures("masw-perf"):
        _use(threads)
        with usage():
            if device != "cpu" and shape is None:
                raise ValueError("--device cuda measures random weights; give --shape")
            if draft_quantization is not None and shape is not None:
                raise ValueError("--draft-quantization is for a recipe's draft, not for --shape")
            settings = bench.StepSettings(numbers(prefixes), numbers(interval), rounds, steps)
        if shape is None:
            decoders, ids, common, settings = _recipe_steps(recipe, settings, draft_quantization)
        else:
            decoders, ids, common = _random_steps(shape, device, dtype, settings)
        with progress(bench.ticks(settings)) as tick:
            rows = bench.measure_steps(decoders, ids, settings, tick)
        record = steps_record(decoders.draft, rows, settings, common)
        emit(record, steps_card(record), json_file)


@app.command()
def kernel(
    shapes: Annotated[str, typer.Option(help="Head shapes: 1b, 3b, 8b.")] = "1b,3b,8b",
    entries: Annotated[
        str, typer.Option(help="Memory entries per sequence of the decode steps.")
    ] = "512,2048,4096,8192,32768",
    batches: Annotated[str, typer.Option(help="Batch sizes of the decode steps.")] = "1,8,32",
    prefixes: Annotated[
        str, typer.Option(help="Prefix lengths in tokens of the prefill chunks.")
    ] = "8192,32768",
    chunk: Annotated[int, typer.Option(help="Raw tokens of a prefill chunk.")] = 512,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    json_file: JsonFile = None,
) -> None:
    """Time and bandwidth of the slot-attention kernels on a CUDA device, beside torch's SDPA."""
    from .bench import kernel as bench

    with failures("masw-perf"):
        with usage():
            settings = bench.KernelSettings(
                words(shapes),
                numbers(entries),
                numbers(batches),
                numbers(prefixes),
                chunk,
                dtype,
            )
        with progress(bench.ticks(settings)) as tick:
            rows, rate = bench.measure_kernels(settings, tick)
        record = bench.kernel_record(rows, rate, settings)
        emit(record, bench.kernel_card(record), json_file)


@app.command()
def speedup(
    recipe: Recipe = EMBEDDED,
    documents: Documents = None,
    prefixes: Annotated[
        str, typer.Option(help="Prefix lengths, separated by commas.")
    ] = "2048,4096",
    new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    prompts: Annotated[int, typer.Option(help="Documents per prefix length.")] = 3,
    draft_tokens: Annotated[int, typer.Option(help="Draft length.")] = 5,
    modes: Annotated[
        str, typer.Option(help="Draft modes, separated by commas.")
    ] = "slots,full,window,none,window-equal",
    pairs: Annotated[int, typer.Option(help="Repeats of the plain loop's overhead.")] = 7,
    draft_quantization: Quantization = None,
    threads: Threads = 0,
    json_file: JsonFile = None,
) -> None:
    """Speed, Tok./Iter and acceptance of the draft modes beside Hugging Face, without a server.

    Exit code 3 where an output differs from Hugging Face's `generate`.
    """
    from ..engines.pair import Pair
    from ..engines.text import TextCodec
    from .bench import speedup as bench
    from .bench.texts import build_prompts

    with failures("masw-perf"):
        with usage():
            settings = bench.SpeedSettings(
                numbers(prefixes), new_tokens, prompts, draft_tokens, words(modes), pairs
            )
        folder = Path(prepare(recipe))
        pair = Pair.load(folder)
        with usage():
            settings.check_pair(pair)
        codec = TextCodec(folder / "target")
        texts = {n: build_prompts(codec, documents, n, prompts) for n in settings.prefixes}
        _use(threads)
        models = bench.Bench.load(folder, draft_quantization)
        with progress(bench.ticks(settings) + 1) as tick:
            rows = bench.measure_speed(models, texts, settings, tick)
            first = next(iter(texts.values()))[0]
            overhead = bench.measure_plain(models, first, settings, tick)
        quantization = {"draft_quantization": models.pair.draft_quantization}
        common = _common(folder, recipe, documents) | quantization
        record = bench.speed_record(rows, overhead, settings, common)
        emit(record, bench.speed_card(record), json_file)
    if not record.ratios["equal"]:
        raise typer.Exit(3)


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="host:port of a running server's gRPC.")] = DEFAULT_URL,
    start: Annotated[
        bool, typer.Option("--start", help="Start a server of the recipe on free ports instead.")
    ] = False,
    recipe: Recipe = EMBEDDED,
    documents: Documents = None,
    prefix: Annotated[int, typer.Option(help="Tokens per prompt.")] = 2048,
    prompts: Annotated[int, typer.Option(min=1, help="Different prompts, sent in turn.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    concurrency: Annotated[str, typer.Option(help="Clients at once.")] = "1,2,4",
    requests: Annotated[int, typer.Option(help="Requests per client.")] = 3,
    draft_tokens: Annotated[
        str, typer.Option(help="Draft lengths; 'default' is the server's, 0 plain decoding.")
    ] = "default,0",
    json_file: JsonFile = None,
) -> None:
    """Streaming requests from several clients at once, sent and timed by perf_analyzer."""
    from ..clients.perf import ServingLoad
    from ..clients.perf_analyzer import prepare_perf_analyzer
    from ..engines.pair import Pair
    from ..engines.text import TextCodec
    from .bench.serving import measure_separately, serving_record, started_server
    from .bench.texts import build_prompts, check_length

    def say(text: str) -> None:
        typer.echo(text, err=True)

    with failures("masw-perf"):
        with usage():
            lengths = [None if word == "default" else word for word in words(draft_tokens)]
            lengths = tuple(word if word is None else numbers(word)[0] for word in lengths)
            # What is wrong with it is told before the pair and the texts are made.
            load = ServingLoad(("later",), max_tokens, numbers(concurrency), lengths, requests)
        prepare_perf_analyzer(say)  # before anything takes long
        folder = Path(prepare(recipe))
        pair = Pair.load(folder)
        with usage():
            check_length(prefix, max_tokens, pair)
        codec = TextCodec(folder / "target")
        texts = tuple(p.text for p in build_prompts(codec, documents, prefix, prompts))
        template = bool(codec.tokenizer.chat_template)
        load = replace(load, texts=texts, apply_chat_template=template)
        with started_server(folder, say) if start else nullcontext(url) as address:
            report = measure_separately(load, folder / "target", address, say)
        record = serving_record(
            report, load, _common(folder, recipe, documents) | {"prefix": prefix, "started": start}
        )
        emit(record, report.table(), json_file)


def _use(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


def _recipe_steps(recipe: str, settings, quantization: str | None):
    """Decoders, tokens, what the record states, and settings with the pair's chunk and memory."""
    from ..engines.decoder import Decoder
    from ..engines.pair import DTYPES, Pair, quantize
    from ..engines.text import TextCodec
    from .bench.draft_step import Decoders
    from .bench.texts import plain_ids

    folder = Path(prepare(recipe))
    pair = Pair.load(folder)
    with usage():
        settings = replace(settings, chunk=pair.chunk, memory=pair.memory)
    decoder = Decoder.load(folder / "draft", DTYPES[pair.dtype])
    decoders = Decoders(decoder, decoder)
    for rule in settings.rules(pair.max_length).values():
        decoders.adaptor(rule)  # a copy of float projections, as long as there are some
    kind = quantization or pair.draft_quantization
    quantize(decoder, kind)
    _check_positions(decoder.config, settings)
    ids = plain_ids(TextCodec(folder / "draft"), max(settings.prefixes))
    return decoders, ids, _common(folder, recipe, None) | {"draft_quantization": kind}, settings


def _check_positions(config, settings) -> None:
    """Raises ValueError for prefixes that a model has no positions for."""
    prefix = max(settings.prefixes)
    needed = settings.max_length(prefix)
    if needed > config.max_positions:
        raise ValueError(
            f"a prefix of {prefix} and its steps need {needed} tokens; the model has "
            f"{config.max_positions} positions"
        )


def _random_steps(shape: str, device: str, dtype: str, settings):
    """Decoders of random weights, random tokens, and what the record states."""
    from ..engines.architectures import architecture
    from .bench import shapes
    from .bench.cuda import device_facts
    from .bench.draft_step import Decoders

    with usage():
        config, kind = architecture(shape), shapes.type_of(dtype)
    _check_positions(config, settings)
    where = shapes.check_device(device)
    decoder = shapes.random_decoder(config, kind, where)
    ids = torch.randint(config.vocab_size, (max(settings.prefixes),)).tolist()
    facts = device_facts(where) if where.type == "cuda" else {}
    common = facts | {"shape": shape, "dtype": dtype, "weights": "random"}
    return Decoders(decoder, shapes.with_plain_attention(decoder)), ids, common


def _common(folder: Path, recipe: str, documents: Path | None) -> dict:
    """What every record states: the pair, its dtype and draft length, the adaptor, the text."""
    from ..engines.adaptor import read_adaptor
    from ..engines.pair import Pair
    from .bench.texts import fingerprint

    pair, adaptor = Pair.load(folder), read_adaptor(folder / "adaptor.safetensors")[0]
    return {
        "recipe": recipe if recipe == EMBEDDED else Path(recipe).name,
        "dtype": pair.dtype,
        "draft_tokens": pair.draft_tokens,
        "base": adaptor.base[:16],
        "adaptor": "trained" if adaptor.trained else "untrained copies",
        "text": fingerprint(documents),
    }


if __name__ == "__main__":
    sys.exit(app())
