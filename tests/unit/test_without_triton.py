"""The Python of docs/without_triton.md runs as it is written, over the doubles of TensorRT-LLM."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from masw.engines.adaptor import AdaptorConfig
from masw.engines.pair import Pair
from masw.plugins.slot_attention.rule import MemoryRule
from tests import pytorch_backend_double, trtllm_double
from tests.pairs import R, S, W, build_pair, new_target, reference

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).parents[2] / "docs" / "without_triton.md"
BLOCKS = [part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]
PROMPT = (5, 6, 7, 8)


class Codec:
    """Stands for the tokenizer, which tiny models lack."""

    def __init__(self, folder):
        assert (folder / "config.json").is_file()

    def encode(self, text, chat_template=False):
        return list(PROMPT)

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """The folders that the page names, in the working directory; returns the models."""
    monkeypatch.chdir(tmp_path)
    models = build_pair(tmp_path / "models")
    folder, draft = tmp_path / "pair", models.drafts["near"]
    folder.mkdir()
    Pair(memory=MemoryRule(S, W, R, 4), max_length=256).save(folder)
    (folder / "target").symlink_to(tmp_path / "models" / "target")
    (folder / "draft").symlink_to(tmp_path / "models" / "near")
    header = AdaptorConfig(draft.fingerprint(), S, W, 4, "evicted")
    draft.copy_adaptor(header).save(folder / "adaptor.safetensors")
    return models


def test_a_generation_over_an_engine(prepared, monkeypatch, capsys, tmp_path):
    inner = new_target(prepared.target, max_length=272)
    executors = trtllm_double.install(monkeypatch, inner)
    (tmp_path / "engines").mkdir()
    trtllm_double.write_engine(tmp_path / "engines" / "target", inner)
    monkeypatch.setattr("masw.engines.text.TextCodec", Codec)
    exec(BLOCKS[0], {})
    wanted = reference(prepared.hf, PROMPT, 128, (2,))
    printed = capsys.readouterr().out
    assert printed.startswith(" ".join(map(str, wanted)) + " {'prefix_tokens': 4")
    assert any(request.drafts for request in executors[0].requests)


def test_several_ranks(prepared, monkeypatch, tmp_path):
    inner = new_target(prepared.target, max_length=272)
    executors = trtllm_double.install(monkeypatch, inner)
    (tmp_path / "engines").mkdir()
    trtllm_double.write_engine(tmp_path / "engines" / "target", inner, ranks=4)
    exec(BLOCKS[1], {})
    assert executors[0].config.parallel_config.device_ids == [0, 1, 2, 3]
    assert executors[0].is_shut_down


def test_the_drafter_config_of_an_llm(prepared, monkeypatch):
    pytorch_backend_double.install(monkeypatch, "1.3")
    seen = {}

    def llm(**fields):
        seen.update(fields)
        return SimpleNamespace(generate=lambda prompts, sampling: prompts)

    package, llmapi = sys.modules["tensorrt_llm"], sys.modules["tensorrt_llm.llmapi"]
    package.LLM, package.SamplingParams, llmapi.KvCacheConfig = llm, dict, dict
    exec(BLOCKS[2], {})
    config = seen["speculative_config"]
    request = pytorch_backend_double.LlmRequest(0, PROMPT, 20)
    backend = pytorch_backend_double.Backend(new_target(prepared.target), config, 1)
    backend.run([request])
    assert request.output == reference(prepared.hf, PROMPT, 20)
    assert max(len(each.drafts) for step in backend.steps for each in step) == 5
    assert len(BLOCKS) == 3
