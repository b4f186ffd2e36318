"""A canary asks a model for a sign of life: any answer will do, an error included."""

import math
import threading
import time

import psutil

from .repository import LOOP
from .triton_install import NoAnswer, ServerError
from .triton_server import TritonServer

PARAMETER = "masw_canary"
BUSY_SHARE = 0.02  # a process that used more of one core than this was computing, not hung


def canary_request(config: dict) -> tuple[str, dict]:
    """(path, JSON body) of the smallest request to a model, given its configuration.

    Every required input is there, zeros or empty, and the request parameter `masw_canary` is
    true, so that a model may answer at once with an empty response; one that does not know the
    parameter refuses the empty input, which is an answer as well.
    """
    name = config["name"]
    if name == LOOP:  # possibly decoupled, where plain `infer` does not exist
        return f"/v2/models/{name}/generate", {"max_tokens": 0, PARAMETER: True}
    inputs = [_empty(tensor) for tensor in config["input"] if not tensor["optional"]]
    return f"/v2/models/{name}/infer", {"inputs": inputs, "parameters": {PARAMETER: True}}


def _empty(tensor: dict) -> dict:
    shape = [1, *(max(0, int(size)) for size in tensor["dims"])]
    kind = tensor["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
    value = {"BYTES": "", "BOOL": False}.get(kind, 0)
    return {
        "name": tensor["name"],
        "shape": shape,
        "datatype": kind,
        "data": [value] * math.prod(shape),
    }


class Canary:
    """Finds a model whose process lives but answers nothing.

    A request goes out every `every` seconds, one at a time, in a thread of its own. The model is
    hung when none came back within `limit` seconds although its process used no processor time:
    one that computes is busy, however long.
    """

    def __init__(
        self,
        server: TritonServer,
        config: dict,
        processes: list[psutil.Process],
        every: float,
        limit: float,
    ):
        self._server, self._processes = server, processes
        self._path, self._body = canary_request(config)
        self._every, self._limit = every, limit
        self._next = time.monotonic() + every
        self._thread: threading.Thread | None = None
        self._hung = False

    def is_hung(self) -> bool:
        """Send the next request when it is due; whether the last one proved the model hung."""
        idle = self._thread is None or not self._thread.is_alive()
        if idle and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()
        return self._hung

    def _ask(self) -> None:
        before = self._processor_seconds()
        try:
            self._server.request(self._path, self._body, timeout=self._limit)
        except NoAnswer:
            used = self._processor_seconds() - before
            self._hung = used < BUSY_SHARE * self._limit
        except ServerError:
            pass  # an answer

    def _processor_seconds(self) -> float:
        try:
            times = [process.cpu_times() for process in self._processes]
        except psutil.Error:
            return math.inf  # it ended: found by the watch on processes
        return sum(time.user + time.system for time in times)
