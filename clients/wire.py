"""Between a client's messages and the server's: inputs to a gRPC request, responses to chunks."""

import re
import time

import grpc
import numpy as np
from tritonclient.grpc import InferResult
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from .messages import Chunk, GenerationRequest, GenerationResult, MaswError, Statistics

_INPUTS = {  # field: (input, dtype)
    "text": ("text_input", np.object_),
    "ids": ("input_ids", np.int32),
    "max_tokens": ("max_tokens", np.int32),
    "stream": ("stream", np.bool_),
    "num_draft_tokens": ("num_draft_tokens", np.int32),
    "adaptive_draft": ("adaptive_draft", np.bool_),
    "use_draft_logits": ("use_draft_logits", np.bool_),
    "temperature": ("temperature", np.float32),
    "top_k": ("top_k", np.int32),
    "top_p": ("top_p", np.float32),
    "seed": ("seed", np.uint64),
    "min_tokens": ("min_tokens", np.int32),
    "stop_words": ("stop_words", np.object_),
    "end_id": ("end_id", np.int32),
    "pad_id": ("pad_id", np.int32),
    "exclude_input_in_output": ("exclude_input_in_output", np.bool_),
    "apply_chat_template": ("apply_chat_template", np.bool_),
    "time_limit": ("time_limit", np.float32),
    "return_perf_metrics": ("return_perf_metrics", np.bool_),
}


def encode(request: GenerationRequest, model: str) -> ModelInferRequest:
    """The gRPC request for `model`: one row, only the inputs that are given.

    Raises ValueError naming the field whose value does not fit its type.
    """
    message = ModelInferRequest(model_name=model)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, (tensor, dtype) in _INPUTS.items():
        value = getattr(request, name)
        if value is not None and value != ():
            _add_input(message, tensor, _array(name, value, dtype))
    if request.ids == ():
        _add_input(message, "input_ids", np.empty(0, np.int32))
    for tensor, array in request.extra.items():
        _add_input(message, tensor, np.asarray(array))
    return message


def _array(name: str, value, dtype) -> np.ndarray:  # (n,)
    items = list(value) if isinstance(value, tuple) else [value]
    if dtype is np.object_:
        return np.array([item.encode() for item in items], dtype=np.object_)
    if np.issubdtype(dtype, np.integer):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        for item in items:
            if not low <= item <= high:
                raise ValueError(f"{name} is {item}; its type holds {low} … {high}")
    return np.array(items, dtype=dtype)


def _add_input(message: ModelInferRequest, name: str, array: np.ndarray) -> None:
    batch = array[None]  # (1, n): every model has a batch dimension
    datatype = np_to_triton_dtype(array.dtype)
    message.inputs.add(name=name, datatype=datatype, shape=batch.shape)
    text = datatype == "BYTES"
    message.raw_input_contents.append(
        serialize_byte_tensor(batch).item() if text else batch.tobytes()
    )


_STATUS = re.compile(r"\b(INVALID_ARGUMENT|UNAVAILABLE|INTERNAL): ")


class Answer:
    """Collects the responses of one request; the clock starts when it is made."""

    def __init__(self, request: GenerationRequest, clock=time.perf_counter):
        self._request = request
        self._clock = clock
        self._start = clock()
        self._chunks: list[Chunk] = []
        self._tokens: int | None = 0  # counted up to the last chunk
        self._elapsed_s: float | None = None
        self._statistics: Statistics | None = None
        self._server_ttft_s: float | None = None

    @property
    def started(self) -> bool:
        """Whether anything of the answer has arrived."""
        return bool(self._chunks)

    def add(self, response: ModelStreamInferResponse) -> Chunk | None:
        """Take one response; returns what it adds, None when that is nothing.

        Raises MaswError for an error that the server sends in place of a response.
        """
        if response.error_message:
            raise refused(response.error_message)
        now = self._clock() - self._start
        tensors = InferResult(response.infer_response)
        if response.infer_response.parameters["triton_final_response"].bool_param:
            self._elapsed_s = now
            self._read_metrics(tensors)
        chunk = self._new_chunk(tensors, now)
        if not (chunk.text or chunk.ids):
            return None
        self._chunks.append(chunk)
        return chunk

    def result(self) -> GenerationResult:
        """The finished answer; MaswError if the responses ended before the final one."""
        if self._elapsed_s is None:
            raise MaswError("INTERNAL", "the stream ended without a final response")
        return GenerationResult(
            text="".join(chunk.text for chunk in self._chunks),
            ids=tuple(token for chunk in self._chunks for token in chunk.ids),
            streamed=self._request.stream,
            chunks=tuple(self._chunks),
            elapsed_s=self._elapsed_s,
            statistics=self._statistics,
            server_ttft_s=self._server_ttft_s,
        )

    def _new_chunk(self, tensors: InferResult, now: float) -> Chunk:
        length = _scalar(tensors, "sequence_length")
        ids: tuple[int, ...] = ()
        if self._request.ids is not None and length is not None:
            known = sum(len(chunk.ids) for chunk in self._chunks)
            ids = tuple(tensors.as_numpy("output_ids").reshape(-1)[known:length].tolist())
        text = (_scalar(tensors, "text_output") or b"").decode(errors="replace")
        return Chunk(text, ids, self._count(length, bool(text or ids)), now)

    def _count(self, length: int | None, taken: bool) -> int | None:
        if length is None or self._request.exclude_input_in_output is False:
            return None
        before = self._tokens
        self._tokens = length if taken else before
        return length - before

    def _read_metrics(self, tensors: InferResult) -> None:
        statistics = _scalar(tensors, "statistics")
        if statistics is not None:
            self._statistics = _parse(statistics.decode())
        arrival = _scalar(tensors, "arrival_time_ns")
        first = _scalar(tensors, "first_token_time_ns")
        if arrival and first:
            self._server_ttft_s = (first - arrival) / 1e9


def _parse(text: str) -> Statistics:
    try:
        return Statistics.from_json(text)
    except ValueError as error:
        raise MaswError("INTERNAL", str(error)) from error


def _scalar(tensors: InferResult, name: str):
    """The first element of an output as a Python value (bytes for text); None where absent."""
    array = tensors.as_numpy(name)
    return None if array is None or not array.size else array.reshape(-1).tolist()[0]


def to_masw_error(
    error: grpc.RpcError, url: str, timeout_s: float | None, *, started: bool
) -> MaswError:
    """The MaswError for a failed gRPC call to `url`; `started`: part of the answer had arrived."""
    status, details = error.code().name, error.details() or ""
    if status == "DEADLINE_EXCEEDED":
        got = "only a part of the answer" if started else "no answer"
        return MaswError(status, f"{got} from {url} within the timeout of {timeout_s:g} s")
    if status == "UNAVAILABLE" and _unreachable(details):
        lost = "the connection was lost" if started else "no server can be reached"
        return MaswError(status, f"{lost} at {url}; `masw-serve` starts one ({details})")
    return MaswError(status, details)


def _unreachable(details: str) -> bool:
    """Whether UNAVAILABLE is gRPC's own word, and not the server's."""
    signs = ("failed to connect", "resolving", "Socket closed", "Connection", "GOAWAY")
    return any(sign in details for sign in signs)


def refused(text: str) -> MaswError:
    """The error that a message of the server's models stands for.

    They write the status in front, "INVALID_ARGUMENT: …". Asking the server for gRPC status codes
    on a stream (header `triton_grpc_error`) crashes Triton 2.51 now and then, so nobody does.
    """
    found = _STATUS.search(text)
    if found is None:
        return MaswError("UNKNOWN", text)
    return MaswError(found[1], text[: found.start()] + text[found.end() :])
