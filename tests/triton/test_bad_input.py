"""Bad input gets INVALID_ARGUMENT that names field and limit, and harms nobody else."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from masw.build.repository import ENSEMBLE, LOOP
from masw.clients.client import MaswClient
from masw.clients.messages import GenerationRequest, MaswError
from tests.triton.pair import PAIR
from tests.triton.serving import PATIENCE, flag, int32, stream, text

pytestmark = pytest.mark.triton


def fp32(*numbers):
    return np.array(numbers, np.float32)


def fp16(*shape):
    return np.ones(shape, np.float16)


def uint64(number):
    return np.array([number], np.uint64)


@dataclass(frozen=True)
class Bad:
    """One bad request: what it changes (None: leaves out), and what the message must name."""

    name: str
    inputs: dict
    words: tuple[str, ...]
    http: bool = True  # whether JSON can say it
    by_server: bool = False  # refused before it reaches a model

    def tensors(self, base):
        given = base | self.inputs
        return {name: array for name, array in given.items() if array is not None}


VOCAB = 49152
REQUEST = {"text_input": text("Hello"), "max_tokens": int32(8)}
LONGEST = str(PAIR.max_length)
NO_TEXT = {"text_input": None}
BAD = [
    Bad("empty prompt", {"text_input": text("")}, ("text_input", "empty")),
    Bad("long prompt", {"text_input": text("word " * 2100)}, ("prompt", LONGEST)),
    Bad("long answer", {"max_tokens": int32(PAIR.max_length)}, ("max_tokens", LONGEST)),
    Bad("longest answer", {"max_tokens": int32(2**31 - 1)}, ("max_tokens", LONGEST)),
    Bad("no token", {"max_tokens": int32(0)}, ("max_tokens", "1 or more")),
    Bad("minus one token", {"max_tokens": int32(-1)}, ("max_tokens", "1 or more")),
    Bad("max_tokens missing", {"max_tokens": None}, ("max_tokens",), True, True),
    Bad("id beyond", NO_TEXT | {"input_ids": int32(1, VOCAB)}, ("input_ids", str(VOCAB - 1))),
    Bad("negative id", NO_TEXT | {"input_ids": int32(5, -1)}, ("input_ids", str(VOCAB - 1))),
    Bad("no ids", NO_TEXT | {"input_ids": int32()}, ("input_ids", "empty"), http=False),
    Bad("long ids", NO_TEXT | {"input_ids": int32(*[5] * 2048)}, ("prompt", LONGEST)),
    Bad("text and ids", {"input_ids": int32(5)}, ("text_input", "input_ids")),
    Bad("neither text nor ids", NO_TEXT, ("text_input", "input_ids")),
    Bad("template for ids", NO_TEXT | {"input_ids": int32(5), "apply_chat_template": flag(True)},
        ("apply_chat_template",)),
    Bad("no UTF-8", {"text_input": text(b"caf\xe9")}, ("text_input", "UTF-8"), http=False),
    Bad("no UTF-8 stop", {"stop_words": text(b"\xff")}, ("stop_words", "UTF-8"), http=False),
    Bad("cold", {"temperature": fp32(-0.5)}, ("temperature", "0 or more")),
    Bad("nan", {"temperature": fp32(np.nan)}, ("temperature", "0 or more"), http=False),
    Bad("inf", {"temperature": fp32(np.inf)}, ("temperature", "0 or more"), http=False),
    Bad("top_p 0", {"top_p": fp32(0)}, ("top_p", "above 0")),
    Bad("top_p 1.5", {"top_p": fp32(1.5)}, ("top_p", "at most 1")),
    Bad("top_p -1", {"top_p": fp32(-1)}, ("top_p", "above 0")),
    Bad("top_p nan", {"top_p": fp32(np.nan)}, ("top_p", "above 0"), http=False),
    Bad("top_k -1", {"top_k": int32(-1)}, ("top_k", "0 (all) or more")),
    Bad("draft of -1", {"num_draft_tokens": int32(-1)}, ("num_draft_tokens", "16")),
    Bad("draft of 17", {"num_draft_tokens": int32(17)}, ("num_draft_tokens", "16")),
    Bad("min above max", {"min_tokens": int32(9)}, ("min_tokens", "max_tokens 8")),
    Bad("min below 0", {"min_tokens": int32(-1)}, ("min_tokens", "0")),
    Bad("end_id beyond", {"end_id": int32(VOCAB)}, ("end_id", str(VOCAB - 1))),
    Bad("end_id -2", {"end_id": int32(-2)}, ("end_id", str(VOCAB - 1))),
    Bad("no time", {"time_limit": fp32(0)}, ("time_limit", "above 0")),
    Bad("time below 0", {"time_limit": fp32(-3)}, ("time_limit", "above 0")),
    Bad("time nan", {"time_limit": fp32(np.nan)}, ("time_limit", "above 0"), http=False),
    Bad("two texts", {"text_input": text("a", "b")}, ("text_input", "1"), False, True),
    Bad("two limits", {"max_tokens": int32(4, 5)}, ("max_tokens", "1"), False, True),
    Bad("wrong type", {"max_tokens": fp32(4)}, ("max_tokens", "INT32"), False, True),
]  # fmt: skip
UNSUPPORTED = {
    "beam_width": int32(2),
    "num_return_sequences": int32(2),
    "length_penalty": fp32(1.5),
    "repetition_penalty": fp32(1.2),
    "presence_penalty": fp32(0.5),
    "frequency_penalty": fp32(-0.5),
    "return_log_probs": flag(True),
    "return_context_logits": flag(True),
    "return_generation_logits": flag(True),
    "bad_words": text("", "evil"),
    "embedding_bias_words": text("good"),
    "embedding_bias_weights": fp32(0, 0.5),
    "decoder_text_input": text("x"),
    "prompt_embedding_table": fp16(2, 3),
    "prompt_vocab_size": int32(2),
    "prompt_table_extra_id": uint64(1),
    "lora_task_id": uint64(1),
    "lora_weights": fp16(2, 3),
    "lora_config": np.ones((1, 3), np.int32),
    "guided_decoding_guide_type": text("json"),
    "guided_decoding_guide": text("{}"),
}
ARRAYS = ("prompt_embedding_table", "lora_weights", "lora_config")  # more than JSON's one axis
BAD += [
    Bad(name, {name: array}, (name, "not supported"), http=name not in ARRAYS)
    for name, array in UNSUPPORTED.items()
]
ENSEMBLE_BAD = [
    bad
    for bad in BAD
    if bad.inputs.get("text_input", ...) is not None and "input_ids" not in bad.inputs
]


def json_value(array):
    values = [v.decode() if isinstance(v, bytes) else v for v in array.tolist()]
    return values[0] if len(values) == 1 else values


def assert_refused(error, bad):
    message = error.message()
    assert all(word in message for word in bad.words), message


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_bad_request_is_refused_by_name(server, bad):
    with pytest.raises(InferenceServerException) as caught:
        stream(server.url, bad.tensors(REQUEST))
    assert_refused(caught.value, bad)


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.http], ids=lambda bad: bad.name)
def test_a_bad_request_over_http_is_a_400(server, bad):
    body = {name: json_value(array) for name, array in bad.tensors(REQUEST).items()}
    for action in ("generate", "generate_stream"):
        status, answer = server.post(f"/v2/models/{LOOP}/{action}", body)
        assert all(word in answer for word in bad.words), answer
        assert status == 400, action


@pytest.mark.parametrize("bad", ENSEMBLE_BAD, ids=lambda bad: bad.name)
def test_the_ensemble_refuses_it_as_well(server, bad):
    with pytest.raises(InferenceServerException) as caught:
        stream(server.url, bad.tensors(REQUEST), ENSEMBLE)
    assert_refused(caught.value, bad)


def test_bad_requests_harm_no_running_one(server, client, tiny):
    prompt = "a long story 🙂 " * 8
    request = GenerationRequest(text=prompt, max_tokens=300)
    with client.stream(request) as running:
        pieces = [next(running).text]
        for bad in BAD:
            with pytest.raises(InferenceServerException):
                stream(server.url, bad.tensors(REQUEST))
        assert server.metric("masw_requests_inflight") <= 1
        pieces += [chunk.text for chunk in running]
        assert running.result.new_tokens == 300
    assert "".join(pieces) == tiny.answer(prompt, 300)


def test_the_client_tells_bad_input_from_other_failures(client):
    with pytest.raises(MaswError, match="max_tokens") as caught:
        client.generate(GenerationRequest(text="Hello", max_tokens=0))
    assert caught.value.status == "INVALID_ARGUMENT"


@pytest.mark.parametrize("model", [LOOP, ENSEMBLE])
def test_many_refusals_at_once_do_the_server_no_harm(server, model):
    """The server itself can crash on errors of streams that ask for gRPC status codes."""
    before = len(server.events)

    def refused(number):
        with MaswClient(server.url, model=model, timeout_s=PATIENCE) as client:
            for _ in range(40):
                with pytest.raises(MaswError, match="1 or more"):
                    request = GenerationRequest(text="" if number % 2 else "a", max_tokens=0)
                    client.generate(request)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(refused, range(8)))
    assert server.metric("masw_requests_inflight") == 0
    assert server.events[before:] == []
