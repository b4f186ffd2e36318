"""Load on a running server, measured by perf_analyzer and counted in tokens.

perf_analyzer sends the requests and writes a profile: when each was sent, when each response came
and what it held. Its own figures count responses, so they are not used; from the profile, with T
the tokens of the concatenated text when tokenised again, this takes per request

- TTFT: first response with text - sent,
- time per output token: (last - first response with text) / (T - 1),
- latency: last response - sent,

and per run tok/s: all T / (last response - first sent). An end token is no text, so T may be one
below the server's own count; a first response that holds several accepted tokens makes the time
per output token that much lower.
"""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import DEFAULT_MODEL, DEFAULT_URL
from .messages import Statistics
from .perf_analyzer import PerfAnalyzerError, Say, prepare_perf_analyzer
from .report import Served, ServingReport, ServingRow

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class ServingLoad:
    """What is sent: every text in turn, from each number of clients at once.

    For each draft length (None: the server's default, 0: plain decoding) and each concurrency,
    after as many warm-up requests as clients, `requests_per_client` x concurrency are measured.
    """

    texts: tuple[str, ...]
    max_tokens: int = 64
    concurrencies: tuple[int, ...] = (1, 2, 4)
    draft_lengths: tuple[int | None, ...] = (None, 0)
    requests_per_client: int = 3
    apply_chat_template: bool = True

    def __post_init__(self):
        if not self.texts or not all(self.texts):
            raise ValueError("texts: give at least one text, none of them empty")
        if min((self.max_tokens, self.requests_per_client, *self.concurrencies), default=0) < 1:
            raise ValueError(
                f"max_tokens {self.max_tokens}, requests_per_client {self.requests_per_client} and "
                f"every one of concurrencies {self.concurrencies} must be at least 1"
            )
        if not self.concurrencies or not self.draft_lengths:
            raise ValueError("concurrencies and draft_lengths need at least one value each")
        if wrong := [length for length in self.draft_lengths if length is not None and length < 0]:
            raise ValueError(f"draft_lengths holds {wrong[0]}; a draft length is 0 or more")

    def input_data(self, draft_length: int | None) -> dict[str, Any]:
        """perf_analyzer's input file: one entry per text."""
        common = {"max_tokens": [self.max_tokens], "stream": [True], "return_perf_metrics": [True]}
        common["apply_chat_template"] = [self.apply_chat_template]
        if draft_length is not None:
            common["num_draft_tokens"] = [draft_length]
        return {"data": [{"text_input": [text], **common} for text in self.texts]}


def measure_serving(
    load: ServingLoad,
    tokenizer_dir: Path,
    *,
    url: str = DEFAULT_URL,
    model: str = DEFAULT_MODEL,
    timeout_s: float = 1800.0,
    say: Say = lambda line: None,
) -> ServingReport:
    """Run perf_analyzer over the load's grid against the gRPC service at `url`.

    `tokenizer_dir` holds the target's Hugging Face tokenizer, which counts the tokens; `timeout_s`
    bounds each run; `say` is told of each step. Raises PerfAnalyzerError when perf_analyzer cannot
    be prepared, a request fails, or the profile is not what it should be.
    """
    count = token_counter(tokenizer_dir)
    command = prepare_perf_analyzer(say)
    rows = []
    for draft_length in load.draft_lengths:
        for concurrency in load.concurrencies:
            drafting = "default draft" if draft_length is None else f"draft length {draft_length}"
            say(f"perf_analyzer: {drafting}, {concurrency} at once")
            runner = _Runner(command, url, model, timeout_s)
            profile = runner.run(load, draft_length, concurrency)
            rows.append(ServingRow.of(draft_length, concurrency, read_profile(profile, count)))
    return ServingReport(url, model, load.max_tokens, len(load.texts), tuple(rows))


def token_counter(tokenizer_dir: Path) -> CountTokens:
    """A function that counts a text's tokens, special tokens not added."""
    from transformers import AutoTokenizer  # takes seconds to import, and only this needs it

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_profile(profile: dict[str, Any], count: CountTokens) -> list[Served]:
    """The requests of a perf_analyzer profile export, in the order of the file.

    Raises PerfAnalyzerError for a profile without requests, or a request without text.
    """
    return [_served(request, count) for request in _requests(profile)]


def _requests(profile: dict[str, Any]) -> Iterator[dict[str, Any]]:
    found = [item for experiment in profile["experiments"] for item in experiment["requests"]]
    if not found:
        raise PerfAnalyzerError("perf_analyzer's profile holds no request")
    yield from found


def _served(request: dict[str, Any], count: CountTokens) -> Served:
    outputs = request["response_outputs"]
    texts = [output.get("text_output") or "" for output in outputs]
    stamps = request["response_timestamps"]
    arrivals = [stamp for stamp, text in zip(stamps, texts, strict=True) if text]
    if not arrivals:
        sent = str(request.get("request_inputs", {}).get("text_input", ""))[:60]
        raise PerfAnalyzerError(f"the request {sent!r} was answered without any text")
    statistics = [output["statistics"] for output in outputs if output.get("statistics")]
    return Served(
        sent_ns=request["timestamp"],
        first_ns=arrivals[0],
        last_ns=arrivals[-1],
        end_ns=stamps[-1],
        tokens=count("".join(texts)),
        responses=len(stamps),
        statistics=Statistics.from_json(statistics[-1]) if statistics else None,
    )


@dataclass(frozen=True)
class _Runner:
    """Runs perf_analyzer once per draft length and concurrency."""

    command: list[str]
    url: str
    model: str
    timeout_s: float

    def run(self, load: ServingLoad, draft_length: int | None, concurrency: int) -> dict:
        """Returns the profile export as parsed JSON."""
        with tempfile.TemporaryDirectory(prefix="masw-perf-") as scratch:
            data, profile = Path(scratch) / "input.json", Path(scratch) / "profile.json"
            data.write_text(json.dumps(load.input_data(draft_length)))
            options = {
                "--input-data": data,
                "--profile-export-file": profile,
                "--concurrency-range": f"{concurrency}:{concurrency}",
                "--request-count": concurrency * load.requests_per_client,
                "--warmup-request-count": concurrency,
            }
            self._call([str(word) for pair in options.items() for word in pair])
            return json.loads(profile.read_text())

    def _call(self, options: list[str]) -> None:
        server = ["-m", self.model, "-u", self.url, "-i", "grpc", "--async", "--streaming"]
        command = [*self.command, *server, *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            raise PerfAnalyzerError(
                f"perf_analyzer did not finish in {self.timeout_s:g} s; use fewer tokens, fewer "
                "requests per client or a longer timeout"
            ) from None
        if done.returncode:
            tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
            raise PerfAnalyzerError(f"perf_analyzer failed (exit code {done.returncode}):\n{tail}")
