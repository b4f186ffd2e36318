"""The other ways in: HTTP `generate` and `generate_stream`, and NVIDIA's ensemble."""

import json
import urllib.request

import numpy as np
import pytest

from masw.build.repository import ENSEMBLE, LOOP
from masw.clients.client import MaswClient
from masw.clients.messages import GenerationRequest
from tests.triton.serving import PATIENCE, flag, int32, stream, text
from tests.triton.test_serving import PROMPTS, cut, stop_words

pytestmark = pytest.mark.triton


@pytest.fixture
def ensemble(server):
    """A gRPC client of the ensemble."""
    with MaswClient(server.url, model=ENSEMBLE, timeout_s=PATIENCE) as connected:
        yield connected


def events(server, model, body):
    """The JSON objects of the server-sent events of `generate_stream`."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.http_port}/v2/models/{model}/generate_stream",
        json.dumps(body).encode(),
        {"Accept": "text/event-stream"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as page:
        lines = [line.decode().strip() for line in page]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


@pytest.mark.parametrize("model", [LOOP, ENSEMBLE])
@pytest.mark.parametrize("prompt", PROMPTS[:4])
def test_http_gives_the_text_of_plain_decoding(server, tiny, model, prompt):
    wanted = tiny.answer(prompt, 40)
    body = {"text_input": prompt, "max_tokens": 40}
    status, answer = server.post(f"/v2/models/{model}/generate", body)
    assert status == 200 and json.loads(answer)["text_output"] == wanted
    parts = events(server, model, body | {"stream": True})
    assert "".join(part.get("text_output", "") for part in parts) == wanted
    assert len([part for part in parts if part.get("text_output")]) > 1


def test_http_takes_every_kind_of_option(server, tiny):
    whole = tiny.answer(PROMPTS[0], 40)
    body = {"text_input": PROMPTS[0], "max_tokens": 40, "return_perf_metrics": True}
    body |= {"stop_words": ["absent", whole[10:12]], "num_draft_tokens": 3, "seed": 2**63}
    status, answer = server.post(f"/v2/models/{LOOP}/generate", body)
    assert status == 200 and json.loads(answer)["text_output"] == cut(whole, (whole[10:12],))
    assert json.loads(json.loads(answer)["statistics"])["finish_reason"] == "stop_words"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_ensemble_gives_the_text_of_the_direct_endpoint(ensemble, tiny, prompt):
    wanted = tiny.answer(prompt, 40)
    for streamed in (True, False):
        for draft_tokens in (None, 0):
            request = GenerationRequest(
                text=prompt, max_tokens=40, stream=streamed, num_draft_tokens=draft_tokens
            )
            result = ensemble.generate(request)
            assert result.text == wanted, (streamed, draft_tokens)
            assert len(result.chunks) == 1 or streamed


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_the_ensemble_cuts_at_stop_words(ensemble, tiny, prompt):
    whole = tiny.answer(prompt, 40)
    for words in stop_words(tiny, prompt):
        for streamed in (True, False):
            request = GenerationRequest(
                text=prompt, max_tokens=40, stream=streamed, stop_words=words
            )
            assert ensemble.generate(request).text == cut(whole, words), words


def test_the_ensemble_takes_template_echo_and_seed(ensemble, client, tiny):
    def same(**options):
        request = GenerationRequest(text=PROMPTS[1], max_tokens=24, **options)
        texts = [each.generate(request).text for each in (ensemble, client)]
        assert texts[0] == texts[1] and texts[0]
        return texts[0]

    assert same(apply_chat_template=True) == tiny.answer(PROMPTS[1], 24, template=True)
    assert same(exclude_input_in_output=False).startswith(PROMPTS[1])
    assert same(temperature=0.9, seed=3) != same(temperature=0.9, seed=4)


def test_the_ensemble_reports_the_performance_outputs(ensemble):
    statistics = ensemble.generate(GenerationRequest(text="Hello", max_tokens=20)).statistics
    assert statistics.new_tokens == 20 and statistics.drafted > 0


@pytest.mark.parametrize("model", [LOOP, ENSEMBLE])
def test_what_nvidias_clients_always_send_is_taken(server, tiny, model):
    inputs = {
        "text_input": text(PROMPTS[0]),
        "max_tokens": int32(20),
        "stream": flag(True),
        "beam_width": int32(1),
        "exclude_input_in_output": flag(True),
        "bad_words": text(""),
        "stop_words": text(""),
        "repetition_penalty": np.array([1], np.float32),
        "presence_penalty": np.array([0], np.float32),
        "frequency_penalty": np.array([0], np.float32),
        "length_penalty": np.array([1], np.float32),
        "return_log_probs": flag(False),
        "return_context_logits": flag(False),
        "return_generation_logits": flag(False),
        "num_return_sequences": int32(1),
        "end_id": int32(-1),
        "pad_id": int32(2),
        "top_k": int32(1),
        "top_p": np.array([1], np.float32),
        "temperature": np.array([1], np.float32),
    }
    pieces = [response["text_output"].item() for response in stream(server.url, inputs, model)]
    assert b"".join(pieces).decode() == tiny.answer(PROMPTS[0], 20)
