"""A running server whose target has the C++ backend's worst manners: texts stay those of plain
decoding, and what cannot be saved fails alone. Nothing is lost to drafts, failures, late or empty
answers, prompts in the output, or padding."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from masw.build.repository import TARGET
from masw.clients.client import MaswClient
from masw.clients.messages import GenerationRequest
from masw.engines.hostile_target import DOOMED_ID
from tests.triton.pair import PAIR
from tests.triton.serving import PATIENCE, arrays, flag, int32, stream, tensors

pytestmark = pytest.mark.triton

TOKENS = 48
PROMPTS = [f"{number} birds and 🙂 中文 not " * (1 + number % 7) for number in range(12)]


@pytest.fixture(scope="module")
def hostile(serve_core):
    """A server of loop, draft and hostile target."""
    return serve_core("--drain-seconds=0", target_mode="hostile")


@pytest.fixture
def client(hostile):
    with MaswClient(hostile.url, timeout_s=PATIENCE) as connected:
        yield connected


def test_many_requests_at_once_get_what_plain_decoding_gives(client, tiny, hostile):
    wanted = [tiny.answer(prompt, TOKENS) for prompt in PROMPTS]

    def ask(number):
        lengths = {"num_draft_tokens": (None, 0, 1, 3, 16)[number % 5], "stream": number % 3 > 0}
        prompt = PROMPTS[number]
        return client.generate(GenerationRequest(text=prompt, max_tokens=TOKENS, **lengths))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(ask, range(len(PROMPTS))))
    assert [answer.text for answer in answers] == wanted
    assert all(answer.new_tokens == TOKENS for answer in answers)
    assert sum(answer.statistics.accepted for answer in answers) > 0
    log = hostile.log_file.read_text()
    for failure in ("out of order for a moment", "gave no token", "no answer within 4 s"):
        assert failure in log, "the target behaved too well to show anything"


def test_short_prompts_ends_and_the_longest_sequence(hostile, tiny):
    """Prompts of 1 to 5 ids, an end id inside, and a prompt that fills max_length but for 20."""
    for length in (1, 2, 3, 5):
        ids = tiny.encode(PROMPTS[0])[:length]
        assert generated(hostile, ids, 24) == tiny.answer_ids(ids, 24)
    ids = tiny.encode(PROMPTS[1])
    free = tiny.answer_ids(ids, 24)
    ended = generated(hostile, ids, 24, end_id=int32(free[9]))
    assert ended == free[: free.index(free[9]) + 1]
    ids = (tiny.encode("the quick brown 🦊 ") * PAIR.max_length)[: PAIR.max_length - 20]
    assert generated(hostile, ids, 20) == tiny.answer_ids(ids, 20)


def test_sampling_with_one_seed_stays_within_the_vocabulary(hostile, tiny):
    ids = tiny.encode(PROMPTS[2])
    fields = {"temperature": np.array([0.8], np.float32), "top_k": int32(20)}
    fields |= {"seed": np.array([7], np.uint64), "return_perf_metrics": flag(True)}
    (response,) = stream(hostile.url, inputs(ids, 24) | fields)
    assert len(response["output_ids"].ravel()) == 24
    assert response["total_accepted_draft_tokens"].item() > 0


def test_failures_beyond_the_bound_reach_only_their_own_client(hostile, tiny):
    ids = tiny.encode(PROMPTS[3])
    doomed = [DOOMED_ID, *ids]

    def ask(prompt):
        try:
            return generated(hostile, prompt, TOKENS)
        except grpcclient.InferenceServerException as error:
            return str(error)

    prompts = [ids, doomed, tiny.encode(PROMPTS[4]), doomed, tiny.encode(PROMPTS[5])]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        if prompt is doomed:
            assert "target failed in 5 attempts" in answer and "for good" in answer
        else:
            assert answer == tiny.answer_ids(prompt, TOKENS)
    assert hostile.metric("masw_requests_inflight") == 0


def test_its_rows_are_padded_and_hold_the_prompt_now_and_then(hostile, tiny):
    """The trouble is real: asked directly, the target shows it."""
    ids = tiny.encode(PROMPTS[6])
    call = {"input_ids": int32(*ids), "input_lengths": int32(len(ids))}
    call |= {"request_output_len": int32(4), "end_id": int32(-1)}
    wanted, seen = tiny.answer_ids(ids, 4), set()
    with grpcclient.InferenceServerClient(hostile.url) as target:
        for _ in range(40):
            try:
                answer = arrays(target.infer(TARGET, tensors(call)))
            except grpcclient.InferenceServerException:
                continue
            row, length = answer["output_ids"].ravel().tolist(), answer["sequence_length"].item()
            echo = row[: len(ids)] == ids
            new = row[len(ids) : length] if echo else row[:length]
            assert new == wanted[: len(new)]
            seen.add((echo, length < len(row), len(new) < 4))
    assert len(seen) > 5, seen


def inputs(ids, tokens):
    return {"input_ids": int32(*ids), "max_tokens": int32(tokens)}


def generated(server, ids, tokens, **fields):
    """New ids of one request that does not stream."""
    (response,) = stream(server.url, inputs(ids, tokens) | fields)
    return response["output_ids"].ravel().tolist()
