"""gRPC clients of the endpoint `tensorrt_llm_bls`: `MaswClient`, and `AsyncMaswClient` for asyncio.

    with MaswClient("127.0.0.1:8001") as client:
        with client.stream(GenerationRequest(text="…", max_tokens=64)) as stream:
            for chunk in stream:
                print(chunk.text, end="")
        print(stream.result.statistics.tok_per_iter)

A client holds one connection and carries any number of requests at once: MaswClient from several
threads, AsyncMaswClient from several tasks of one event loop. Each request is its own gRPC stream,
half-closed after the one message: the end of the stream is the end of the answer, and cancelling
the stream cancels the request.
"""

from functools import cached_property
from typing import Self

import grpc
import grpc.aio
from tritonclient.grpc.service_pb2 import ModelReadyRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from .messages import Chunk, GenerationRequest, GenerationResult, MaswError
from .wire import Answer, encode, to_masw_error

DEFAULT_URL = "127.0.0.1:8001"
DEFAULT_MODEL = "tensorrt_llm_bls"
DEFAULT_TIMEOUT_S = 600.0
MOST_TIMEOUT_S = 1e6  # eleven days: more is a slip, and much more no transport takes

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a server that starts later is found soon
    ("grpc.enable_http_proxy", 0),
)


def _checked(timeout_s: float | None) -> float | None:
    """A timeout that can be kept."""
    if timeout_s is not None and not 0 < timeout_s <= MOST_TIMEOUT_S:
        raise ValueError(
            f"timeout is {timeout_s}; give seconds above 0, at most {MOST_TIMEOUT_S:,.0f}"
        )
    return timeout_s


class _Stream:
    """What both kinds of stream share: the call, the answer so far, and the final result."""

    def __init__(self, call, answer: Answer, url: str, timeout_s: float | None):
        self._call = call
        self._answer = answer
        self._url = url
        self._timeout_s = timeout_s
        self._result: GenerationResult | None = None

    @property
    def result(self) -> GenerationResult:
        """The whole answer; RuntimeError before the iteration has reached its end."""
        if self._result is None:
            raise RuntimeError("the answer is not complete; iterate to its end first")
        return self._result

    def close(self) -> None:
        """Cancel what is still running; nothing happens to a finished answer."""
        self._call.cancel()

    def __del__(self):
        self.close()

    def _failure(self, error: grpc.RpcError | MaswError) -> MaswError:
        self.close()
        if isinstance(error, MaswError):
            return error
        return to_masw_error(error, self._url, self._timeout_s, started=self._answer.started)


class GenerationStream(_Stream):
    """The chunks of one answer as they arrive; `result` once the iteration has ended.

    Leaving early cancels the request: at the end of `with`, by `close()`, or when the object is
    dropped. Iterating raises MaswError as `MaswClient.stream` says.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            for response in self._call:
                chunk = self._answer.add(response)
                if chunk is not None:
                    return chunk
        except (grpc.RpcError, MaswError) as error:
            raise self._failure(error) from error
        self._result = self._answer.result()
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


class AsyncGenerationStream(_Stream):
    """GenerationStream for `async for` and `async with`; `close` and `result` are as there."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                chunk = self._answer.add(response)
                if chunk is not None:
                    return chunk
        except (grpc.RpcError, MaswError) as error:
            raise self._failure(error) from error
        self._result = self._answer.result()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info) -> None:
        self.close()


class MaswClient:
    """A blocking client; safe to use from several threads at once.

    `url` is host:port of the server's gRPC service; `timeout_s` bounds each request from sending
    to its last response (None: no bound; ValueError above `MOST_TIMEOUT_S`). Use it in `with`, or
    call `close()`.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ):
        self.url = url
        self.model = model
        self.timeout_s = _checked(timeout_s)
        self._channel = grpc.insecure_channel(url, options=_OPTIONS)
        self._stub = GRPCInferenceServiceStub(self._channel)

    def stream(self, request: GenerationRequest) -> GenerationStream:
        """Send the request and iterate over its chunks; `request.stream` false gives one chunk.

        Raises ValueError for a value that cannot be sent. Iterating raises MaswError for a refused
        or failed request, a server that cannot be reached, the timeout, and an answer that ends
        without its final response.
        """
        message = encode(request, self.model)
        answer = Answer(request)
        call = self._stub.ModelStreamInfer(iter([message]), timeout=self.timeout_s)
        return GenerationStream(call, answer, self.url, self.timeout_s)

    def generate(self, request: GenerationRequest) -> GenerationResult:
        """Send the request and wait for the whole answer. Raises as `stream` and its iteration."""
        with self.stream(request) as stream:
            for _ in stream:
                pass
            return stream.result

    def is_ready(self) -> bool:
        """Whether the server answers and says that the model is ready."""
        try:
            request = ModelReadyRequest(name=self.model)
            return self._stub.ModelReady(request, timeout=self.timeout_s).ready
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Close the connection; running requests are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


class AsyncMaswClient:
    """MaswClient for asyncio: one event loop, any number of tasks; it connects at first use.

    Cancelling the task that reads a stream cancels the request.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ):
        self.url = url
        self.model = model
        self.timeout_s = _checked(timeout_s)

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.url, options=_OPTIONS)

    @cached_property
    def _stub(self) -> GRPCInferenceServiceStub:
        return GRPCInferenceServiceStub(self._channel)

    def stream(self, request: GenerationRequest) -> AsyncGenerationStream:
        """As `MaswClient.stream`, for `async for`; call it inside the running event loop."""
        message = encode(request, self.model)
        answer = Answer(request)
        call = self._stub.ModelStreamInfer(iter([message]), timeout=self.timeout_s)
        return AsyncGenerationStream(call, answer, self.url, self.timeout_s)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Send the request and wait for the whole answer. Raises as `stream` and its iteration."""
        async with self.stream(request) as stream:
            async for _ in stream:
                pass
            return stream.result

    async def is_ready(self) -> bool:
        """Whether the server answers and says that the model is ready."""
        try:
            request = ModelReadyRequest(name=self.model)
            return (await self._stub.ModelReady(request, timeout=self.timeout_s)).ready
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        """Close the connection, if there is one; running requests are cancelled."""
        if "_channel" in self.__dict__:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()
