"""`make demo`: a real document summarised through Triton, proven equal to plain decoding.

Prepares the embedded pair, starts the server on free ports, streams a summary of part of the
Python manual (text that every CPython carries), decodes it again without a draft, compares, and
stops the server. With `--compare` the same answer is also drafted from other memories, and each
Tok./Iter is printed. The last line of output is one JSON object.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console

from ..clients.card import generation_card
from ..clients.client import MaswClient
from ..clients.compare import Comparison
from ..clients.generate import compare_with_plain, compose_prompt, run_generation
from ..clients.messages import Chunk, GenerationRequest
from ..engines.decoder import Decoder
from ..engines.pair import Pair
from ..engines.text import TextCodec
from .adaptor.answers import Answerer
from .adaptor.comparison import Comparison as MemoryComparison
from .adaptor.comparison import compare
from .adaptor.samples import Sample
from .bench.record import new_card
from .embedded_pair import ModelPreparationError, prepare_embedded_pair
from .repository import RepositoryConfig, write_repository
from .supervisor import Supervisor
from .triton_install import ServerError, masw_home
from .triton_server import ServerConfig, TritonServer, free_ports

LANE = "cpu"
QUERY = "Summarise the text above in a few sentences."


def demo_document(characters: int) -> str:
    """The first `characters` of Python's own manual topics, cut after a whole line."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return text[: text.rindex("\n", 0, characters)]


@contextmanager
def embedded_server(say) -> Iterator[ServerConfig]:
    """The embedded pair served on free ports, for the time of the block."""
    repository = masw_home() / "repositories" / "demo"
    write_repository(RepositoryConfig(recipe=str(prepare_embedded_pair(say))), repository)
    http, grpc, metrics = free_ports()
    config = ServerConfig(repository, "127.0.0.1", http, grpc, metrics)
    supervisor = Supervisor(TritonServer(config))
    supervisor.start()
    try:
        yield config
    finally:
        supervisor.server.kill()


def demo_request(characters: int = 14_000, max_tokens: int = 96) -> GenerationRequest:
    """The demo's greedy summary request."""
    return GenerationRequest(
        text=compose_prompt(demo_document(characters), QUERY),
        max_tokens=max_tokens,
        temperature=0.0,
        apply_chat_template=True,
    )


def run_demo(console: Console) -> Comparison:
    """Serves, summarises with streaming, decodes plainly, and returns both answers."""
    started, request = time.monotonic(), demo_request()
    with embedded_server(lambda line: console.print(f"[dim]{line}[/]")) as config:
        console.print(f"[dim]server ready after {time.monotonic() - started:.0f} s[/]")
        with MaswClient(f"{config.host}:{config.ports['grpc']}") as client:
            result = run_generation(client, request, _show)
            print(flush=True)
            console.print("[dim]decoding the same without a draft[/]")
            return compare_with_plain(client, request, result)


def summary(comparison: Comparison) -> dict:
    """The demo's numbers, one JSON object."""
    result, plain = comparison.speculative, comparison.plain
    return {
        "lane": LANE,
        "prefix_tokens": result.statistics.prefix_tokens,
        "new_tokens": result.statistics.new_tokens,
        "tok_per_iter": round(result.statistics.tok_per_iter, 3),
        "acceptance_rate": round(result.statistics.acceptance_rate, 4),
        "tok_s": round(result.tok_s, 3),
        "plain_tok_s": round(plain.tok_s, 3),
        "equal": comparison.equal,
    }


def compare_memories(console: Console) -> dict[str, float]:
    """Tok./Iter of the demo's answer for several draft memories, printed as a card.

    The answer is Hugging Face's; each memory takes one forward over it, which gives the count of
    the running loop exactly (adaptor/evaluation.py).
    """
    pair, request = prepare_embedded_pair(), demo_request()
    ids = TextCodec(pair / "target").encode(request.text, chat_template=True)
    sample = Sample(tuple(ids), kind="demo", prefix=len(ids))
    console.print("[dim]decoding with Hugging Face, then drafting from each memory[/]")
    answerer = Answerer(pair / "target", torch.float32)
    [[answered]] = answerer.run([sample], request.max_tokens, 1)
    memory = Pair.load(pair).memory
    comparison = MemoryComparison(
        {"slots, trained": pair / "adaptor.safetensors"},
        untrained=((memory.window, memory.interval),),
        equal=(memory.interval,),
        swa=(),
        snapkv=False,
        sink=memory.sink,
        window=memory.window,
        max_tokens=request.max_tokens,
    )
    decoder = Decoder.load(pair / "draft")
    found = compare(comparison, decoder, [answered], lambda text: None, distances=False)
    card = new_card(f"draft memories, prefix {len(ids)}", ("memory", "entries", "Tok./Iter"))
    for row in found:
        card.add_row(row.memory, f"{row.entries:,}", f"{row.tok_iter:.2f}")
    console.print(card)
    return {row.memory: round(row.tok_iter, 3) for row in found}


def main(arguments: Sequence[str]) -> int:
    """Runs the demo; exit code 1 where the outputs differ, 2 where it could not run."""
    console = Console(stderr=True, highlight=False)
    try:
        comparison = run_demo(console)
    except (ServerError, ModelPreparationError) as error:
        console.print(f"demo: {error}", markup=False)
        return 2
    console.print(generation_card(comparison.speculative, comparison, title="masw demo, lane cpu"))
    numbers = summary(comparison)
    if "--compare" in arguments:
        numbers["memories"] = compare_memories(console)
    print(json.dumps(numbers), flush=True)
    return 0 if comparison.equal else 1


def _show(chunk: Chunk) -> None:
    print(chunk.text, end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
