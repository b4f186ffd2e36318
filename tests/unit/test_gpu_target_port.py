"""The gpu lane's loop model: target port and limits follow the engine that the backend serves."""

import asyncio
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from masw.build.repository import RepositoryConfig
from masw.build.trtllm_config import BackendTarget
from masw.engines.engine_folder import EngineFolderError
from masw.engines.local import Batcher, generate
from masw.engines.messages import Sampling
from masw.engines.pair import Pair
from masw.engines.sequence import GenerationRequest
from masw.engines.speculative import SpeculativeLoop
from masw.engines.trtllm_folder import padded_vocab
from masw.triton_repo.targets import loop_limits, target_engine, target_port
from tests.models import random_ids
from tests.pairs import Kind, loop_settings, new_draft, new_target, reference
from tests.triton_double import TritonDouble, TrtllmBackend
from tests.trtllm_double import write_engine

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST, NEW, RANKS = 200, 24, 4


def settings_of(folder):
    """What a Triton model of the gpu lane reads of its repository."""
    target = BackendTarget(str(folder), tuple(range(RANKS)))
    return SimpleNamespace(**asdict(RepositoryConfig("/pair", draft_gpu=4, target=target)))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_k=20)])
def test_the_loop_speaks_to_the_backend_as_its_engine_wants(pair, tmp_path, sampling):
    """Greedy output equals Hugging Face's; the backend's double asserts everything it is sent."""
    engine = new_target(pair.target, max_length=LONGEST)
    folder = write_engine(tmp_path / "engine", engine, RANKS, max_seq_len=LONGEST + 16)
    config = settings_of(folder)
    built = target_engine(config)
    vocab = pair.target.config.vocab_size
    width = padded_vocab(vocab, RANKS)
    assert width > vocab  # 307 is no multiple of 4
    backend = TrtllmBackend(engine, width, LONGEST + 16)
    triton = TritonDouble(tensorrt_llm=backend)
    port = target_port(triton, config.target_mode, pair.target.config, built)
    draft = new_draft(pair.drafts["near"], Kind(), max_length=LONGEST)
    limits = loop_limits(built, Pair(max_length=LONGEST))
    assert limits["target_chunk"] == 0 and limits["max_seq_len"] == LONGEST + 16
    settings = loop_settings(max_length=LONGEST, rule=draft.memory.rule, **limits)
    loop = SpeculativeLoop(port, Batcher(draft.propose), settings)
    ids = tuple(random_ids(90))
    found, statistics = asyncio.run(generate(loop, GenerationRequest(ids, NEW, sampling, seed=3)))
    assert len(found) == NEW and statistics.drafted > 0
    if sampling.greedy:
        assert found == list(reference(pair.hf, ids, NEW))


def test_the_cpu_lane_has_no_engine_and_keeps_its_limits():
    config = SimpleNamespace(**asdict(RepositoryConfig("/pair")))
    assert target_engine(config) is None and loop_limits(None, Pair()) == {}


def test_an_engine_that_cannot_verify_drafts_stops_the_model_at_its_start(pair, tmp_path):
    engine = new_target(pair.target, max_length=LONGEST)
    folder = write_engine(tmp_path / "engine", engine, speculative_decoding_mode=0)
    with pytest.raises(EngineFolderError, match="draft_tokens_external"):
        target_engine(settings_of(folder))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_length": 193}, "max_length is 193; .*up to 192: .*larger --max_seq_len"),
        ({"max_draft_tokens": 9}, "max_draft_tokens is 9; .*up to 8: .*larger --max_draft_len"),
    ],
)
def test_an_engine_too_small_for_the_pair_stops_the_model_at_its_start(
    pair, tmp_path, limits, message
):
    """A plain call keeps max_draft_len back, however few drafts the pair allows."""
    engine = new_target(pair.target, max_length=LONGEST, max_draft_tokens=8)
    built = target_engine(settings_of(write_engine(tmp_path / "engine", engine, RANKS)))
    fitting = Pair(max_length=192, max_draft_tokens=4, draft_tokens=4)
    assert loop_limits(built, fitting)["max_seq_len"] == LONGEST
    with pytest.raises(EngineFolderError, match=message):
        loop_limits(built, replace(fitting, **limits))
