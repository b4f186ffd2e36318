"""Stands for the servers that a launch line starts: run as
`fake_triton.py HTTP_PORT METRICS_PORT REPOSITORY`.

It writes the log lines by which the deployment's scripts know ranks and models, answers their HTTP
requests as Triton does, and notes in $FAKE_EVENTS, one a line, what happened to it. $FAKE_PLAN is a
JSON object:

    ranks          ranks of the target (1); each writes its own lines, tagged as mpirun does
    stuck_rank     this rank does not get as far as its KV cache, and no port opens: Triton opens
                   them once its models are loaded
    exit           ends with this code while loading
    running        seconds that a request still runs once the loop is unloaded (none at 0)
    token          false: a request for a token is answered with an error; a number: after so many
    sick           after so many tokens the server no longer says that it is ready
    draft          false: the draft's process is not to be found
    deaf           true: ignores SIGTERM
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLAN = {"ranks": 1, "stuck_rank": None, "exit": None, "running": 0, "token": True, "deaf": False}
PLAN |= {"draft": True, "sick": None}
PLAN |= json.loads(os.environ.get("FAKE_PLAN", "{}"))


class State:
    """Tokens emitted, and when the running request ends."""

    emitted = 0
    unloaded: float | None = None

    @classmethod
    def inflight(cls) -> int:
        began = cls.unloaded
        return int(
            PLAN["running"] > 0 and (not began or time.monotonic() < began + PLAN["running"])
        )


def note(event: str) -> None:
    with open(os.environ["FAKE_EVENTS"], "a") as file:
        print(event, file=file)


def start_draft() -> None:
    """A process that is known by the same words as the draft's; its id goes to the events."""
    code = f"{sys.argv[3]}/masw_draft/1/model.py"
    words = [sys.executable, "-c", "import time; time.sleep(60)", code]
    note(f"draft process {subprocess.Popen(words).pid}")


def load() -> None:
    for rank in range(PLAN["ranks"]):
        tag = f"[1,{rank}]<stderr>:" if PLAN["ranks"] > 1 else ""
        print(f'{tag}I1130 00:40:38.4 7 model_lifecycle.cc:472] "loading: tensorrt_llm:1"')
        print(f"{tag}[TensorRT-LLM][INFO] Rank {rank} is using GPU {rank}")
        if rank != PLAN["stuck_rank"]:
            print(f"{tag}[TensorRT-LLM][INFO] Allocated 9 GiB for max tokens in paged KV cache (9)")
    if PLAN["stuck_rank"] is None:
        tag = "[1,0]<stderr>:" if PLAN["ranks"] > 1 else ""
        line = "I1130 00:40:40.5 7 model_lifecycle.cc:839]"
        print(f"{tag}{line} \"successfully loaded 'tensorrt_llm'\"")
    sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            return self._answer(
                200,
                f"masw_emitted_tokens_total {State.emitted}\n"
                f"masw_requests_inflight {State.inflight()}\n"
                'nv_inference_pending_request_count{model="tensorrt_llm_bls",version="1"} 0\n'
                'nv_inference_pending_request_count{model="other",version="1"} 3\n',
            )
        if self.path == "/v2/models/tensorrt_llm_bls/ready":
            return self._answer(400 if State.unloaded else 200)
        if self.path == "/v2/health/ready":
            return self._answer(400 if State.emitted >= (PLAN["sick"] or math.inf) else 200)
        self._answer(200 if self.path == "/v2/health/live" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v2/repository/models/tensorrt_llm_bls/unload":
            State.unloaded = State.unloaded or time.monotonic()
            note("unload")
            return self._answer(200)
        if self.path.startswith("/v2/repository/models/masw_draft/"):
            note(f"draft {self.path.rpartition('/')[2]}")
            if self.path.endswith("/load"):
                start_draft()
            return self._answer(200)
        assert self.path == "/v2/models/tensorrt_llm_bls/generate", self.path
        note(f"generate {body['max_tokens']}")
        if State.unloaded or (PLAN["token"] is not True and State.emitted >= PLAN["token"]):
            return self._answer(500, '{"error": "no rank answers"}')
        State.emitted += 1
        self._answer(200, '{"text_output": "4"}')

    def _answer(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def on_term(*_: object) -> None:
    note(f"term with {State.inflight()} running")
    if not PLAN["deaf"]:
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, on_term)
    load()
    if PLAN["exit"] is not None:
        sys.exit(PLAN["exit"])
    if PLAN["stuck_rank"] is None:
        if PLAN["draft"]:
            start_draft()
        for port in map(int, sys.argv[1:3]):
            server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
    time.sleep(120)  # no test takes that long


if __name__ == "__main__":
    main()
