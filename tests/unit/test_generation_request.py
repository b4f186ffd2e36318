"""A request's tensors become what the user asked for, or an error that names field and limit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from masw.build.tensors import BLS_INPUTS, NEUTRAL_OPTIONS
from masw.engines.messages import InvalidRequest, Sampling
from masw.engines.text import TextCodec
from masw.triton_repo.generation import NEUTRAL, read_ask
from tests.tiny_tokenizers import byte_level

VOCAB, END_IDS = 300, (7,)
DTYPES = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64}
DTYPES |= {"FP16": np.float16}
KINDS = {tensor.name: tensor.data_type for tensor in BLS_INPUTS}


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return TextCodec(byte_level(tmp_path_factory.mktemp("tokenizer")))


def values(**fields):
    """Inputs as the server gives them: one row, in the type that the model's config states."""
    return {name: array(name, field) for name, field in fields.items() if field is not None}


def array(name, field):
    items = field if isinstance(field, list) else [field]
    if KINDS[name] == "STRING":
        return np.array([i if isinstance(i, bytes) else i.encode() for i in items], object)
    return np.array(items, DTYPES[KINDS[name]])


def read(codec, end_ids=END_IDS, **fields):
    return read_ask(
        values(**{"text_input": "the cat", "max_tokens": 8} | fields), codec, VOCAB, end_ids
    )


def test_only_text_and_length_are_needed(codec):
    ask = read(codec)
    request = ask.generation
    assert request.ids == tuple(codec.encode("the cat")) and request.max_tokens == 8
    assert request.sampling.greedy and request.end_ids == END_IDS
    assert request.draft_tokens is None and request.min_tokens == 0
    assert not request.adaptive and request.use_draft_logits
    assert ask.by_text and not ask.stream and not ask.echo and not ask.statistics
    assert ask.stop_words == () and ask.time_limit == float("inf")


def test_every_field_arrives(codec):
    ask = read(
        codec,
        text_input=None,
        input_ids=[5, 0, VOCAB - 1],
        max_tokens=9,
        stream=True,
        num_draft_tokens=3,
        use_draft_logits=False,
        adaptive_draft=True,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        seed=2**64 - 1,
        min_tokens=2,
        stop_words=["a", "", "🙂"],
        end_id=11,
        pad_id=0,
        exclude_input_in_output=True,
        return_perf_metrics=True,
        time_limit=2.5,
    )
    request = ask.generation
    assert request.ids == (5, 0, VOCAB - 1) and request.max_tokens == 9
    assert request.sampling == Sampling(0.5, 4, 0.75) and request.seed == 2**64 - 1
    assert request.draft_tokens == 3 and request.adaptive and not request.use_draft_logits
    assert request.min_tokens == 2 and request.end_ids == (11,)
    assert not ask.by_text and ask.stream and ask.statistics and ask.time_limit == 2.5
    assert ask.stop_words == ("a", "🙂"), "an empty stop word is NVIDIA's 'none'"


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, Sampling()),
        ({"temperature": 0.0}, Sampling(0.0)),
        ({"top_k": 1}, Sampling(1.0, 1)),
        ({"temperature": 0.5}, Sampling(0.5)),
        ({"top_p": 0.5}, Sampling(1.0, 0, 0.5)),
        ({"top_k": 0}, Sampling(1.0)),
        ({"temperature": 1.0, "top_k": 1, "top_p": 1.0}, Sampling(1.0, 1)),
    ],
)
def test_sampling_is_greedy_unless_asked_for(codec, fields, sampling):
    assert read(codec, **fields).generation.sampling == sampling
    assert sampling.greedy == (
        fields.get("temperature") == 0 or fields.get("top_k") == 1 or not fields
    )


def test_without_a_seed_each_request_has_one_of_its_own(codec):
    seeds = {read(codec, temperature=1.0).generation.seed for _ in range(8)}
    assert len(seeds) == 8


@pytest.mark.parametrize(("given_id", "ids"), [(None, END_IDS), (-1, ()), (0, (0,)), (299, (299,))])
def test_end_ids(codec, given_id, ids):
    assert read(codec, end_id=given_id).generation.end_ids == ids


def test_the_template_wraps_the_text(codec):
    wrapped = read(codec, apply_chat_template=True).generation.ids
    assert wrapped == tuple(codec.encode("the cat", chat_template=True))
    assert read(codec, apply_chat_template=False).generation.ids == tuple(codec.encode("the cat"))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text_input": ""}, "text_input"),
        ({"text_input": b"\xff"}, "text_input.*UTF-8"),
        ({"text_input": None}, "text_input and input_ids"),
        ({"input_ids": [1]}, "text_input and input_ids"),
        ({"text_input": None, "input_ids": []}, "input_ids is empty"),
        ({"text_input": None, "input_ids": [1, -1]}, "input_ids.*299"),
        ({"text_input": None, "input_ids": [VOCAB]}, "input_ids.*299"),
        ({"text_input": None, "input_ids": [1], "apply_chat_template": True}, "text_input"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": []}, "max_tokens"),
        ({"temperature": -0.1}, "temperature.*0 or more"),
        ({"temperature": NAN}, "temperature.*0 or more"),
        ({"temperature": INF}, "temperature.*0 or more"),
        ({"top_k": -1}, "top_k.*0"),
        ({"top_p": 0.0}, "top_p.*above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p.*above 0 and at most 1"),
        ({"top_p": NAN}, "top_p.*above 0 and at most 1"),
        ({"end_id": VOCAB}, "end_id.*299"),
        ({"end_id": -2}, "end_id.*299"),
        ({"stop_words": ["a", b"\xf0\x9f"]}, "stop_words.*UTF-8"),
        ({"time_limit": 0.0}, "time_limit.*above 0"),
        ({"time_limit": -1.0}, "time_limit.*above 0"),
        ({"time_limit": NAN}, "time_limit.*above 0"),
    ],
)
def test_bad_fields_are_refused_by_name(codec, fields, words):
    with pytest.raises(InvalidRequest, match=words):
        read(codec, **fields)


def test_min_tokens_with_several_end_ids_needs_a_choice(codec):
    with pytest.raises(InvalidRequest, match="min_tokens needs end_id"):
        read(codec, end_ids=(7, 8), min_tokens=3)
    assert read(codec, end_ids=(7, 8), min_tokens=3, end_id=8).generation.end_ids == (8,)


NEUTRAL_VALUES = {
    "beam_width": [1],
    "num_return_sequences": [1],
    "length_penalty": [0.0, 1.0],
    "repetition_penalty": [1.0],
    "bad_words": ["", []],
    "embedding_bias_words": ["", []],
    "decoder_text_input": [""],
    "guided_decoding_guide_type": [""],
    "guided_decoding_guide": [""],
    "prompt_embedding_table": [[]],
    "lora_weights": [[]],
    "lora_config": [[]],
}


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_an_unsupported_input_is_taken_at_its_neutral_value_only(codec, name):
    for value in NEUTRAL_VALUES.get(name, [0]):
        assert read(codec, **{name: value}) is not None
    other = "x" if KINDS[name] == "STRING" else 2
    with pytest.raises(InvalidRequest, match=f"{name} .*not supported"):
        read(codec, **{name: other})


def test_every_input_of_the_model_is_read_or_refused():
    """No input that the config takes is ignored in silence."""
    refused = {tensor.name for tensor in NEUTRAL_OPTIONS} | {"beam_width"}
    assert set(NEUTRAL) == refused
    assert refused <= set(KINDS)


SCALARS = {"INT32": st.integers(-(2**31), 2**31 - 1), "FP32": st.floats(width=32)}
SCALARS |= {"BOOL": st.booleans(), "UINT64": st.integers(0, 2**64 - 1)}
FUZZED = [t.name for t in BLS_INPUTS if t.data_type in SCALARS and t.dims == (1,)]


@given(fields=st.dictionaries(st.sampled_from(FUZZED), st.none(), max_size=4), data=st.data())
def test_any_scalars_give_a_request_or_a_clear_error(codec, fields, data):
    drawn = {name: data.draw(SCALARS[KINDS[name]], name) for name in fields}
    try:
        read(codec, **drawn)
    except InvalidRequest as error:
        assert any(name in str(error) for name in drawn)
