"""Load on a server: a running one, or one of the embedded pair for the time of the measurement."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

from ...clients.perf import ServingLoad, measure_serving
from ...clients.report import ServingReport
from ..repository import RepositoryConfig, write_repository
from ..supervisor import Supervisor
from ..triton_server import ServerConfig, TritonServer, free_ports
from .record import Record, rounded


@contextmanager
def started_server(pair: Path, say: Callable[[str], None]) -> Iterator[str]:
    """The gRPC address of a server of that pair on free ports, for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="masw-perf-") as scratch:
        repository = Path(scratch) / "repository"
        write_repository(RepositoryConfig(recipe=str(pair)), repository)
        http, grpc, metrics = free_ports()
        log = Path(scratch) / "server.log"
        config = ServerConfig(repository, "127.0.0.1", http, grpc, metrics, log_file=log)
        supervisor = Supervisor(TritonServer(config), report=lambda kind, text: say(text))
        supervisor.start()
        try:
            yield f"{config.host}:{grpc}"
        finally:
            supervisor.server.stop()


def separate_loads(load: ServingLoad) -> list[ServingLoad]:
    """One load for each draft length and concurrency, no text of which any other load sends.

    Every text gets a first line of its own: a prefix that the server still holds from another row
    would spare that row its prefill. Only the warm-up of a row sends texts that it sends again,
    one for each client.
    """
    cells = enumerate(product(load.draft_lengths, load.concurrencies))
    return [
        replace(
            load,
            texts=tuple(
                f"Request {number}.{place}\n\n{load.texts[place % len(load.texts)]}"
                for place in range(clients * load.requests_per_client)
            ),
            draft_lengths=(draft_length,),
            concurrencies=(clients,),
        )
        for number, (draft_length, clients) in cells
    ]


def measure_separately(
    load: ServingLoad, tokenizer: Path, url: str, say: Callable[[str], None]
) -> ServingReport:
    """The rows of `load` without prefixes cached between them; raises as `measure_serving`."""
    reports = [measure_serving(part, tokenizer, url=url, say=say) for part in separate_loads(load)]
    rows = tuple(row for report in reports for row in report.rows)
    return replace(reports[0], texts=len(load.texts), rows=rows)


def serving_record(report: ServingReport, load: ServingLoad, common: dict) -> Record:
    """Rows with the ratio of the default draft length to plain decoding at every concurrency."""
    rate = {(row.num_draft_tokens, row.concurrency): row.tok_s for row in report.rows}
    ratios = {
        f"tok_s vs plain, {clients} at once": rounded(rate[None, clients] / rate[0, clients])
        for clients in load.concurrencies
        if (None, clients) in rate and (0, clients) in rate
    }
    settings = {
        "model": report.model,
        "max_tokens": load.max_tokens,
        "texts": len(load.texts),
        "concurrencies": load.concurrencies,
        "draft_lengths": load.draft_lengths,
        "requests_per_client": load.requests_per_client,
        "streaming": True,
        "cached_prefixes": "of one request per client, by the warm-up",
    }
    return Record("serve", common | settings, report.rows, ratios)
