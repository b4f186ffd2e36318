"""Clients without a server: wire format, statistics, timing, comparison, composition, card."""

import json

import grpc
import numpy as np
import pytest
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor
from typer.testing import CliRunner

from masw.clients.card import card_rows
from masw.clients.client import AsyncMaswClient, MaswClient
from masw.clients.compare import Comparison, first_difference
from masw.clients.generate import app, check_comparable, compose_prompt
from masw.clients.messages import (
    Chunk,
    GenerationRequest,
    GenerationResult,
    MaswError,
    Statistics,
)
from masw.clients.wire import Answer, encode, to_masw_error

STATISTICS = {
    "prefix_tokens": 4000,
    "new_tokens": 12,
    "iterations": 4,
    "drafted": 20,
    "accepted": 8,
    "drafted_at": [4, 4, 4, 4, 4, 0],
    "accepted_at": [4, 2, 1, 1, 0, 0],
    "rollbacks": 4,
    "slots_materialized": 480,
    "slots_discarded": 2,
    "prefill_ms": 900.0,
    "draft_ms": 60.0,
    "verify_ms": 120.0,
    "host_ms": 20.0,
    "draft_failures": 0,
    "finish_reason": "length",
}
DTYPES = {"INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_, "FP32": np.float32}
UNREACHABLE = "127.0.0.1:9"


def response(final=False, error="", **tensors):
    """A stream response with outputs given as name=(datatype, values); shapes are [1, n]."""
    message = ModelStreamInferResponse(error_message=error)
    infer = message.infer_response
    infer.parameters["triton_final_response"].bool_param = final
    for name, (datatype, values) in tensors.items():
        array = np.array([values], dtype=DTYPES.get(datatype, np.object_))
        infer.outputs.add(name=name, datatype=datatype, shape=array.shape)
        text = datatype == "BYTES"
        infer.raw_output_contents.append(
            serialize_byte_tensor(array).item() if text else array.tobytes()
        )
    return message


def text(value):
    return ("BYTES", [value.encode()])


def ids(values):
    return {"output_ids": ("INT32", values), "sequence_length": ("INT32", [len(values)])}


def result(answer="", tokens=(), times=(), counts=None, statistics=None, streamed=True, **more):
    counts = counts or [None] * len(times)
    chunks = tuple(Chunk("x", (), n, at) for n, at in zip(counts, times, strict=True))
    return GenerationResult(answer, tuple(tokens), streamed, chunks, 9.0, statistics, **more)


@pytest.fixture
def clock():
    ticks = iter(range(100))
    return lambda: next(ticks)


class FailedCall(grpc.RpcError):
    def __init__(self, code, details):
        self._code, self._details = code, details

    def code(self):
        return self._code

    def details(self):
        return self._details


# request


@pytest.mark.parametrize("given", [{}, {"text": "a", "ids": (1,)}])
def test_request_needs_exactly_one_of_text_and_ids(given):
    with pytest.raises(ValueError, match="exactly one of text and ids"):
        GenerationRequest(**given)


def test_request_refuses_a_single_string_as_stop_words():
    with pytest.raises(ValueError, match="tuple of strings"):
        GenerationRequest(text="a", stop_words="END")


@pytest.mark.parametrize(
    ("sampling", "greedy"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_p": 0.5}, True),
        ({"temperature": 0.7, "top_k": 1}, True),
        ({"temperature": 0.7}, False),
        ({"top_k": 5}, False),
        ({"top_p": 0.9}, False),
    ],
)
def test_request_knows_greedy_decoding(sampling, greedy):
    assert GenerationRequest(text="a", **sampling).greedy is greedy


def test_encode_sends_only_what_is_given():
    message = encode(GenerationRequest(text="é", max_tokens=3), "loop")
    assert message.model_name == "loop"
    assert {item.name: item.datatype for item in message.inputs} == {
        "text_input": "BYTES",
        "max_tokens": "INT32",
        "stream": "BOOL",
        "return_perf_metrics": "BOOL",
    }
    assert all(list(item.shape) == [1, 1] for item in message.inputs)
    assert deserialize_bytes_tensor(message.raw_input_contents[0]).tolist() == ["é".encode()]


def test_encode_every_field_in_its_type():
    request = GenerationRequest(
        ids=(1, 2, 3),
        num_draft_tokens=0,
        adaptive_draft=False,
        use_draft_logits=True,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        seed=2**64 - 1,
        min_tokens=1,
        stop_words=("a", "bc"),
        end_id=2,
        pad_id=0,
        exclude_input_in_output=True,
        apply_chat_template=False,
        time_limit=1.5,
        extra={"length_penalty": np.ones(1, np.float32)},
    )
    message = encode(request, "loop")
    raw = dict(zip([item.name for item in message.inputs], message.raw_input_contents, strict=True))
    kinds = {item.name: (item.datatype, list(item.shape)) for item in message.inputs}
    assert kinds["input_ids"] == ("INT32", [1, 3])
    assert kinds["stop_words"] == ("BYTES", [1, 2])
    assert kinds["seed"] == ("UINT64", [1, 1])
    assert kinds["length_penalty"] == ("FP32", [1, 1])
    assert np.frombuffer(raw["seed"], np.uint64) == 2**64 - 1
    assert np.frombuffer(raw["top_p"], np.float32) == 0.25
    assert np.frombuffer(raw["num_draft_tokens"], np.int32) == 0
    assert raw["adaptive_draft"] == b"\0"
    assert len(kinds) == 19


def test_encode_leaves_limits_to_the_server_but_names_what_cannot_be_sent():
    encode(GenerationRequest(text="", max_tokens=0, temperature=-1.0), "loop")
    message = encode(GenerationRequest(ids=()), "loop")
    assert list(message.inputs[-1].shape) == [1, 0]
    with pytest.raises(ValueError, match="seed is -1"):
        encode(GenerationRequest(text="a", seed=-1), "loop")
    with pytest.raises(ValueError, match="ids is 2147483648"):
        encode(GenerationRequest(ids=(2**31,)), "loop")


# answer


def test_answer_concatenates_text_and_reads_the_statistics(clock):
    answer = Answer(GenerationRequest(text="a"), clock)
    assert answer.add(response(text_output=text("Hé"))) == Chunk("Hé", (), None, 1)
    assert answer.add(response(text_output=text(""))) is None
    final = response(
        True,
        text_output=text("llo"),
        statistics=text(json.dumps(STATISTICS)),
        arrival_time_ns=("INT64", [1_000_000_000]),
        first_token_time_ns=("INT64", [1_250_000_000]),
    )
    assert answer.add(final).time_s == 3
    whole = answer.result()
    assert (whole.text, whole.ids, whole.elapsed_s) == ("Héllo", (), 3)
    assert whole.statistics == Statistics.from_json(json.dumps(STATISTICS))
    assert (whole.ttft_s, whole.server_ttft_s) == (1, 0.25)


def test_answer_takes_new_ids_from_cumulative_ones(clock):
    answer = Answer(GenerationRequest(ids=(1,)), clock)
    assert answer.add(response(**ids([5, 6]))).ids == (5, 6)
    assert answer.add(response(**ids([5, 6]))) is None
    assert answer.add(response(True, **ids([5, 6, 7]))) == Chunk("", (7,), 1, 3)
    assert answer.result().ids == (5, 6, 7)
    assert answer.result().new_tokens == 3


def test_answer_counts_tokens_of_text_that_was_held_back(clock):
    answer = Answer(GenerationRequest(text="a"), clock)
    answer.add(response(text_output=text("a"), sequence_length=("INT32", [2])))
    answer.add(response(text_output=text(""), sequence_length=("INT32", [5])))
    last = answer.add(response(True, text_output=text("b"), sequence_length=("INT32", [6])))
    assert last.tokens == 4


def test_answer_ends_with_an_empty_final_response(clock):
    answer = Answer(GenerationRequest(text="a"), clock)
    answer.add(response(text_output=text("a")))
    assert answer.add(response(True)) is None
    assert answer.result().text == "a"


def test_answer_without_a_final_response_is_an_error(clock):
    answer = Answer(GenerationRequest(text="a"), clock)
    answer.add(response(text_output=text("a")))
    with pytest.raises(MaswError, match="without a final response"):
        answer.result()


def test_answer_raises_the_servers_message(clock):
    with pytest.raises(MaswError, match="max_tokens is 0") as caught:
        Answer(GenerationRequest(text="a"), clock).add(response(error="max_tokens is 0"))
    assert caught.value.status == "UNKNOWN"


def test_answer_with_unreadable_statistics_is_an_error(clock):
    answer = Answer(GenerationRequest(text="a"), clock)
    with pytest.raises(MaswError, match="lack new_tokens"):
        short = {name: value for name, value in STATISTICS.items() if name != "new_tokens"}
        answer.add(response(True, statistics=text(json.dumps(short))))


# errors


@pytest.mark.parametrize(
    ("code", "details", "started", "expected"),
    [
        ("INVALID_ARGUMENT", "max_tokens is 0", False, "max_tokens is 0"),
        ("DEADLINE_EXCEEDED", "Deadline", True, "a part of the answer .* timeout of 7 s"),
        ("UNAVAILABLE", "failed to connect to all", False, "no server .* here:1; `masw-serve`"),
        ("UNAVAILABLE", "Socket closed", True, "connection was lost at here:1"),
        ("UNAVAILABLE", "64 requests wait already", False, r"^64 requests wait already \[UNAV"),
    ],
)
def test_errors_carry_status_and_a_way_out(code, details, started, expected):
    call = FailedCall(grpc.StatusCode[code], details)
    error = to_masw_error(call, "here:1", 7.0, started=started)
    assert error.status == code
    with pytest.raises(MaswError, match=expected):
        raise error


@pytest.mark.parametrize("client", [MaswClient, AsyncMaswClient])
def test_a_timeout_that_cannot_be_kept_is_refused(client):
    with pytest.raises(ValueError, match="timeout is -1; give seconds above 0"):
        client(UNREACHABLE, timeout_s=-1)


def test_no_server_is_a_clear_error():
    with MaswClient(UNREACHABLE, timeout_s=5) as client:
        assert not client.is_ready()
        with pytest.raises(MaswError, match=f"{UNREACHABLE}; `masw-serve` starts one") as caught:
            client.generate(GenerationRequest(text="a"))
    assert caught.value.status == "UNAVAILABLE"


# statistics and timing


def test_statistics_rates():
    numbers = Statistics.from_json(json.dumps(STATISTICS | {"new_field": 1}))
    assert numbers.tok_per_iter == 3
    assert numbers.acceptance_rate == 0.4
    assert numbers.acceptance_by_position == (1, 0.5, 0.25, 0.25, 0)
    assert numbers.decode_s == pytest.approx(0.2)


def test_statistics_of_plain_decoding_have_no_acceptance():
    nothing = {"drafted": 0, "accepted": 0, "drafted_at": [], "accepted_at": [], "iterations": 12}
    numbers = Statistics.from_json(json.dumps(STATISTICS | nothing))
    assert (numbers.tok_per_iter, numbers.acceptance_rate) == (1, 0)
    assert numbers.acceptance_by_position == ()


def test_statistics_name_what_is_missing():
    with pytest.raises(ValueError, match="lack prefix_tokens"):
        Statistics.from_json("{}")


def test_decode_rate_leaves_out_the_first_chunk():
    numbers = Statistics.from_json(json.dumps(STATISTICS))
    assert result(times=(1, 2), statistics=numbers).tok_s == 11  # 12 tokens, one assumed first
    assert result(times=(1, 2), counts=(4, 8), statistics=numbers).tok_s == 8
    assert result(times=(1, 2), counts=(4, 8)).tok_s == 8
    assert result(times=(1, 2), counts=(4, 8)).ttft_s == 1


def test_rates_of_an_answer_in_one_piece_come_from_the_server():
    numbers = Statistics.from_json(json.dumps(STATISTICS))
    whole = result(times=(3,), statistics=numbers, streamed=False, server_ttft_s=0.5)
    assert whole.tok_s == pytest.approx(60)
    assert whole.ttft_s == 0.5
    assert result(times=(3,), streamed=False).tok_s is None
    assert result(statistics=numbers).ttft_s is None


def test_summary_is_json():
    summary = result(
        times=(1, 2), statistics=Statistics.from_json(json.dumps(STATISTICS))
    ).summary()
    assert json.loads(json.dumps(summary)) | {"tok_per_iter": 3.0} == summary | {
        "statistics": STATISTICS
    }


# comparison


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [("abc", "abc", None), ("abc", "abd", 2), ("ab", "abc", 2), ("", "a", 0), ((1, 2), (1, 3), 1)],
)
def test_first_difference(mine, other, expected):
    assert first_difference(mine, other) == expected


def test_comparison_shows_the_difference_with_context():
    comparison = Comparison(result("one two"), result("one too"))
    assert not comparison.equal
    shown = str(comparison.difference)
    assert "character 5" in shown
    assert "'one t' → 'wo'" in shown
    assert "'one t' → 'oo'" in shown


def test_comparison_prefers_ids_and_shows_an_early_end():
    comparison = Comparison(result("x", (1, 2)), result("x", (1, 2, 3)))
    assert str(comparison.difference).endswith("speculative [1, 2] → end, plain [1, 2] → [3]")
    assert comparison.difference.unit == "token"


def test_comparison_gives_the_ratio_of_decode_rates():
    numbers = Statistics.from_json(json.dumps(STATISTICS))
    fast = result("x", times=(1, 2), statistics=numbers)
    slow = result("x", times=(1, 3), statistics=numbers)
    assert Comparison(fast, slow).speedup == 2
    assert Comparison(fast, result("x")).speedup is None
    assert Comparison(fast, slow).summary() == {
        "equal": True,
        "plain_tok_s": 5.5,
        "plain_ttft_s": 1,
        "speedup": 2,
    }


def test_only_greedy_requests_are_comparable():
    check_comparable(GenerationRequest(text="a", temperature=0.0))
    with pytest.raises(ValueError, match="greedy"):
        check_comparable(GenerationRequest(text="a", temperature=0.8))


# masw-generate


@pytest.mark.parametrize(
    ("document", "query", "prompt"),
    [
        ("Text.\n", "Sum up. ", "Text.\n\nSum up."),
        ("  Text", "", "  Text"),
        ("\n", "Hello", "Hello"),
    ],
)
def test_prompt_is_document_blank_line_query(document, query, prompt):
    assert compose_prompt(document, query) == prompt


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="nothing to send"):
        compose_prompt("\n ", " ")


def test_card_rows_and_a_difference_with_markup():
    numbers = Statistics.from_json(json.dumps(STATISTICS))
    mine = result("[/bold] one", times=(1, 2), statistics=numbers)
    rows = dict(card_rows(mine, Comparison(mine, result("[/bold] two"))))
    assert rows["Tokens"] == "4,000 prefix, 12 new"
    assert rows["Iterations"] == "4 (Tok./Iter 3.00)"
    assert rows["Acceptance"] == "40.0% (8 of 20; 5.0 drafted per iteration)"
    assert rows["By position"] == "100%  50%  25%  25%  0%"
    assert rows["Time"].startswith("prefill 900.0 ms, draft 60.0 ms (30%), verify 120.0 ms (60%)")
    assert rows["Speed"] == "11.0 tok/s, TTFT 1.00 s, total 9.00 s"
    assert "first difference at character 8" in rows["Equal to plain"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", UNREACHABLE], "masw-serve"),
        (["--compare", "--top-p", "0.5"], "greedy"),
        (["--seed", "-1"], "seed is -1"),
        (["no-such-file"], "no-such-file"),
        (["--stop", ""], "--stop is empty"),
        (["--timeout", "inf"], "timeout is inf; give seconds above 0, at most 1,000,000"),
        (["--timeout", "nan"], "timeout is nan"),
        (["--timeout", "1e300"], "timeout is 1e+300"),
        (["--timeout", "0"], "timeout is 0.0"),
    ],
)
def test_generate_fails_with_a_message_and_code_2(arguments, message):
    done = CliRunner().invoke(app, ["--query", "Hi", *arguments], input="text")
    assert done.exit_code == 2
    assert message in done.stderr
    assert not done.stdout
