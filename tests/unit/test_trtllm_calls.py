"""Calls as TensorRT-LLM's C++ backend must get them, and how its output rows are read."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from masw.engines.messages import (
    InvalidRequest,
    Proposal,
    Sampling,
    TargetCall,
    TargetError,
    TargetUnavailable,
)
from masw.engines.trtllm_calls import TrtllmCalls
from masw.engines.trtllm_folder import padded_vocab
from masw.triton_repo.ports import NO_END, TargetModel
from tests.triton_double import TritonDouble, output

V, WIDTH = 10, 16  # the engine's ids, and its columns: padded to a multiple of 8
SAMPLED = Sampling(0.7)
PROMPT = list(range(1, 9)) * 3


def call(drafts=(), logits=None, ids=PROMPT, output_tokens=None, **fields):
    tokens = output_tokens or len(drafts) + 1
    return TargetCall(np.array(ids, np.int32), tokens, Proposal(tuple(drafts), logits), **fields)


def adapt(*args, **fields):
    return TrtllmCalls(V, 8).adapt(call(*args, **fields))


@pytest.mark.parametrize(("vocab", "multiple", "width"), [(10, 1, 10), (10, 4, 12), (12, 4, 12)])
def test_padded_vocab(vocab, multiple, width):
    assert padded_vocab(vocab, multiple) == width


def test_padded_logits_keep_the_drafts_distribution():
    logits = torch.randn(3, V)
    logits[1, 4] = -torch.inf
    sent = adapt((1, 2, 3), logits, sampling=SAMPLED).proposal
    assert sent.ids == (1, 2, 3) and sent.logits.shape == (3, WIDTH)
    assert torch.isfinite(sent.logits).all()
    probabilities = sent.logits.softmax(-1)
    torch.testing.assert_close(probabilities[:, :V], logits.softmax(-1))
    assert not probabilities[:, V:].any()


@pytest.mark.parametrize("unknown", [V, WIDTH - 1, WIDTH, WIDTH + 4])
def test_a_draft_of_more_ids_ends_before_the_first_that_the_target_lacks(unknown):
    """An id of the padding is none of the target's either."""
    logits = torch.randn(4, WIDTH + 5)
    sent = adapt((1, V - 1, unknown, 2), logits, sampling=SAMPLED)
    assert sent.proposal.ids == (1, V - 1) and sent.output_tokens == 3
    probabilities = sent.proposal.logits.softmax(-1)
    wanted = logits[:2, :V].softmax(-1)  # the draft's distribution, given an id of the target
    torch.testing.assert_close(probabilities[:, :V], wanted)
    assert probabilities.shape == (2, WIDTH) and not probabilities[:, V:].any()
    assert adapt((1, V - 1, unknown, 2)).proposal == Proposal((1, V - 1))
    assert adapt((unknown, 2), torch.randn(2, 20), sampling=SAMPLED).proposal == Proposal()


def test_half_precision_logits_are_sent_in_full_precision():
    logits = torch.tensor([[0.0, -6e4, -torch.inf, 3.0]], dtype=torch.float16)
    sent = adapt((3,), logits, sampling=SAMPLED).proposal.logits
    assert sent.dtype == torch.float32 and torch.isfinite(sent).all()
    assert sent.softmax(-1)[0, [1, 2, 4]].sum() == 0


def test_sampling_without_logits_decodes_plainly_because_exact_match_is_biased_there():
    sent = adapt((1, 2, 3), sampling=SAMPLED)
    assert sent.proposal == Proposal() and sent.output_tokens == 4
    assert adapt((1, 2, 3), sampling=Sampling(1.0, top_k=1)).proposal.ids == (1, 2, 3)


@pytest.mark.parametrize("end_ids", [(), (3,), (3, 4, 5), None])
def test_no_end_id_is_given_so_that_the_output_holds_it(end_ids):
    sent = adapt((1, 2), end_ids=end_ids)
    assert sent.end_ids == () and sent.min_tokens == 0 and sent.proposal.ids == (1, 2)


@pytest.mark.parametrize("left", [1, 2, 3, 9])
def test_while_min_tokens_lasts_the_end_id_is_forbidden_at_every_position(left):
    sent = adapt((1, 2, 3, 4), end_ids=(3,), min_tokens=left)
    assert sent.end_ids == (3,) and sent.min_tokens == left
    assert sent.output_tokens == min(5, left) <= left
    assert sent.proposal.ids == (1, 2, 3, 4)[: left - 1]
    assert adapt((1, 2), end_ids=(), min_tokens=left).min_tokens == 0


def test_min_tokens_with_several_end_ids_is_refused():
    with pytest.raises(InvalidRequest, match=r"min_tokens is 2; it needs end_id.*has 3"):
        adapt((1, 2), end_ids=(3, 4, 5), min_tokens=2)


@pytest.mark.parametrize("fields", [{"vocab": 0}, {"vocab": 8, "multiple": 0}])
def test_bad_fields_are_refused_by_name(fields):
    with pytest.raises(ValueError, match=list(fields)[-1]):
        TrtllmCalls(**fields)


# --- through the tensors ------------------------------------------------------------------------


def through(row, length=None, sent=None):
    """The verdict on an output row, and the inputs that the target got."""

    async def serve(values):
        return output(row, length)

    triton = TritonDouble(tensorrt_llm=serve)
    verdict = asyncio.run(TargetModel(triton, None, V)(sent or adapt((1, 2, 3))))
    return list(verdict.ids), triton.calls[0]


@given(
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    new=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    asked=st.integers(1, 20),
    drafts=st.lists(st.integers(0, 2), max_size=5),
    padding=st.lists(st.integers(0, 2), max_size=9),
    echo=st.booleans(),
)
def test_a_row_is_read_rightly_whether_or_not_it_holds_the_prompt(
    ids, new, asked, drafts, padding, echo
):
    """Few ids and short prompts, so that outputs repeat the prompt by chance."""
    sent = adapt(drafts, ids=ids, output_tokens=None if drafts else asked)
    new = new[: sent.output_tokens]
    row = [*ids, *new] if echo else new
    verdict, inputs = through([*row, *padding], len(row), sent)
    assert verdict == new
    assert inputs["request_output_len"][0] == sent.output_tokens
    assert ("draft_input_ids" in inputs) == bool(sent.proposal.ids)


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("length", [2, 3, 24])
def test_a_row_without_new_ids_is_an_empty_verdict(length, echo):
    ids = PROMPT[:length]
    sent = adapt(ids=ids, output_tokens=16)
    assert through([*(ids if echo else []), 5, 5], length if echo else 0, sent)[0] == []


@pytest.mark.parametrize(
    ("row", "length", "words"),
    [
        ([*PROMPT[::-1], 5], None, "output_ids has 25 ids; request_output_len is 4.* 24 of input"),
        ([*PROMPT, 1, 2, 3, 4, 5], None, "output_ids has 29 ids"),
        (PROMPT[:10], None, "output_ids has 10 ids"),
        ([1, 2], 3, "sequence_length is 3; output_ids has 2 ids"),
        ([1, 2], -1, "sequence_length is -1"),
    ],
    ids=["another prompt", "too many", "part of the prompt", "length beyond", "negative"],
)
def test_a_row_that_is_no_answer_is_an_error(row, length, words):
    with pytest.raises(TargetError, match=words) as caught:
        through(row, length)
    assert not isinstance(caught.value, TargetUnavailable)


@pytest.mark.parametrize("token", [-1, V, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_a_failure_that_may_pass(token):
    with pytest.raises(TargetUnavailable, match="output_ids has an id outside 0 to 9"):
        through([1, token])


def test_an_answer_without_tensors_is_a_failure_that_may_pass():
    async def serve(values):
        return {"sequence_length": np.array([1], np.int32)}

    port = TargetModel(TritonDouble(tensorrt_llm=serve), None, V)
    with pytest.raises(TargetUnavailable, match="without output_ids"):
        asyncio.run(port(call((1,))))


def test_the_inputs_are_those_of_the_c_backend():
    logits = torch.randn(2, V)
    fields = {"sampling": Sampling(0.7, 5, 0.9), "seed": 2**63 - 1, "end_ids": (3, 4)}
    _, inputs = through([5], sent=adapt((1, 2), logits, **fields))
    wanted = {
        "input_ids": PROMPT,
        "input_lengths": [24],
        "request_output_len": [3],
        "draft_input_ids": [1, 2],
        "runtime_top_k": [5],
        "seed": [2**63 - 1],
        "end_id": [NO_END],
        "min_tokens": [0],
        "exclude_input_in_output": [True],
    }
    assert {name: inputs[name].tolist() for name in wanted} == wanted
    assert inputs["temperature"] == np.float32(0.7) and inputs["runtime_top_p"] == np.float32(0.9)
    assert inputs["draft_logits"].dtype == np.float32
    assert set(inputs) == {*wanted, "temperature", "runtime_top_p", "draft_logits"}
    assert inputs["input_ids"].dtype == inputs["draft_input_ids"].dtype == np.int32


@pytest.mark.parametrize(
    ("message", "passes"),
    [
        ("INVALID_ARGUMENT: draft_input_ids has 17 ids", False),
        ("Stub process 'tensorrt_llm_0_0' is not healthy.", False),
        ("Request for unknown model: 'tensorrt_llm' is not found", False),
        ("Encountered an error in forwardAsync function", True),
        ("INTERNAL: out of order for a moment", True),
    ],
)
def test_errors_of_the_target_are_told_apart(message, passes):
    async def fail(values):
        raise RuntimeError(message)

    port = TargetModel(TritonDouble(tensorrt_llm=fail), None, V)
    with pytest.raises(TargetError, match="the target failed: ") as caught:
        asyncio.run(port(call((1,))))
    assert isinstance(caught.value, TargetUnavailable) == passes
