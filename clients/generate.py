"""`masw-generate`: a document and a query in, the answer and a card of what it took out.

The answer goes to standard output, everything else to standard error. Exit codes: 0 done (and
equal, with --compare), 1 --compare found a difference, 2 a usage error or a failed request,
130 interrupted (the request is cancelled).
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .card import generation_card
from .client import DEFAULT_MODEL, DEFAULT_TIMEOUT_S, DEFAULT_URL, MaswClient
from .compare import Comparison
from .messages import Chunk, GenerationRequest, GenerationResult, MaswError

app = typer.Typer(add_completion=False)

_SAMPLING = "Sampling"


def compose_prompt(document: str, query: str) -> str:
    """Document, blank line, query; either may be empty. Raises ValueError if both are."""
    parts = [part for part in (document.strip("\r\n"), query.strip()) if part.strip()]
    if not parts:
        raise ValueError("nothing to send: give a document, a --query, or both")
    return "\n\n".join(parts)


def run_generation(
    client: MaswClient,
    request: GenerationRequest,
    on_chunk: Callable[[Chunk], None] | None = None,
) -> GenerationResult:
    """Send the request, call `on_chunk` for each chunk as it arrives, return the whole answer.

    An exception, also of `on_chunk` or a Ctrl-C, cancels the request. Raises as MaswClient.stream.
    """
    with client.stream(request) as stream:
        for chunk in stream:
            if on_chunk is not None:
                on_chunk(chunk)
        return stream.result


def compare_with_plain(
    client: MaswClient, request: GenerationRequest, result: GenerationResult
) -> Comparison:
    """Answer the request again by plain decoding and compare it with `result`.

    Raises ValueError for a request that samples: its two answers follow the same distribution but
    need not be the same text.
    """
    check_comparable(request)
    plain = replace(request, num_draft_tokens=0, adaptive_draft=None, use_draft_logits=None)
    return Comparison(result, run_generation(client, plain))


def check_comparable(request: GenerationRequest) -> None:
    """Raise ValueError unless the request decodes greedily, so that its answer is one text."""
    if not request.greedy:
        raise ValueError(
            "--compare needs greedy decoding, whose answer is one text: leave out --temperature, "
            "--top-k and --top-p, or set --temperature 0"
        )


@app.command()
def main(
    document: Annotated[
        Path | None,
        typer.Argument(help="Text file; '-' or nothing reads standard input.", show_default=False),
    ] = None,
    query: Annotated[str, typer.Option("--query", "-q", help="What to ask of it.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(help="Draft length; 0 is plain decoding.", show_default="the server's"),
    ] = None,
    adaptive_draft: Annotated[
        bool, typer.Option("--adaptive-draft", help="Adapt the draft length to the acceptance.")
    ] = False,
    stream: Annotated[bool, typer.Option(help="Print the answer as it grows.")] = True,
    raw: Annotated[bool, typer.Option("--raw", help="Send without the chat template.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode plainly and compare; exit 1 if unequal.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)
    ] = None,
    top_k: Annotated[int | None, typer.Option(rich_help_panel=_SAMPLING)] = None,
    top_p: Annotated[float | None, typer.Option(rich_help_panel=_SAMPLING)] = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=_SAMPLING)] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Fewest tokens to generate.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Server's limit in seconds.", show_default="the server's"),
    ] = None,
    url: Annotated[str, typer.Option(help="host:port of the gRPC service.")] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Endpoint.")] = DEFAULT_MODEL,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the whole answer.")
    ] = DEFAULT_TIMEOUT_S,
) -> None:
    """Ask a running server (masw-serve) about a document.

    The prompt is the document, a blank line and the query, sent as one user message.

    The answer goes to standard output, the card with its numbers to standard error.
    """
    try:
        check_stop_words(stop or [])
        request = GenerationRequest(
            text=compose_prompt(_read(document, query), query),
            max_tokens=max_tokens,
            stream=stream,
            num_draft_tokens=num_draft_tokens,
            adaptive_draft=adaptive_draft or None,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            min_tokens=min_tokens,
            stop_words=tuple(stop or ()),
            apply_chat_template=not raw,
            time_limit=time_limit,
        )
        if compare:
            check_comparable(request)
        with MaswClient(url, model=model, timeout_s=timeout) as client:
            code = _run(client, request, compare, as_json)
    except BrokenPipeError:  # the reader of our output has gone, which is no failure of ours
        raise
    except (MaswError, ValueError, OSError) as error:
        typer.echo(f"masw-generate: {error}", err=True)
        code = 2
    except KeyboardInterrupt:
        typer.echo("\nmasw-generate: interrupted, request cancelled", err=True)
        code = 130
    raise typer.Exit(code)


def check_stop_words(words: list[str]) -> None:
    """Raise ValueError for an empty one, which servers take as none at all."""
    if "" in words:
        raise ValueError("--stop is empty; give the text that ends the answer")


def _read(document: Path | None, query: str) -> str:
    if document is not None and str(document) != "-":
        return document.read_text(encoding="utf-8")
    if document is None and query and sys.stdin.isatty():
        return ""
    return sys.stdin.read()


def _run(client: MaswClient, request: GenerationRequest, compare: bool, as_json: bool) -> int:
    console = Console(stderr=True)
    result = _print_answer(client, request, console)
    comparison = None
    if compare:
        with console.status("decoding plainly for comparison"):
            comparison = compare_with_plain(client, request, result)
    console.print(generation_card(result, comparison))
    if as_json:
        numbers = result.summary() | (comparison.summary() if comparison else {})
        print(json.dumps({"url": client.url, **numbers}), flush=True)
    return 0 if comparison is None or comparison.equal else 1


def _print_answer(
    client: MaswClient, request: GenerationRequest, console: Console
) -> GenerationResult:
    """Print chunks as they come; until the first one a status line says what is waited for."""
    status = console.status("reading the document")

    def show(chunk: Chunk) -> None:
        status.stop()
        print(chunk.text, end="", flush=True)

    with status:
        result = run_generation(client, request, show)
    print(flush=True)
    return result
