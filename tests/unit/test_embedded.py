"""The embedded model itself: logits and greedy output equal Hugging Face's, in float32."""

import pydoc_data.topics

import pytest
import torch
from transformers import AutoModelForCausalLM

from masw.build.embedded_pair import prepare_embedded_pair
from masw.engines.decoder import Decoder
from masw.engines.draft import TorchDraft
from masw.engines.local import generate_all
from masw.engines.pair import DraftMode, Pair, load_adaptor
from masw.engines.sequence import GenerationRequest
from masw.engines.target import TorchTarget
from masw.engines.text import TextCodec
from masw.plugins.slot_attention.rule import MemoryRule

NEW_TOKENS = 32
TEST_LENGTHS = (20, 128, 257, 300, 700, 3100)
VERIFY_LENGTHS = (1, 5, 127, 129, 255, 256, 271, 272, 273, 280, 400, 513, 640, 801, 1000, 1200)
VERIFY_LENGTHS += (1500, 1900, 2400, 3300)


@pytest.fixture(scope="module")
def folder():
    return prepare_embedded_pair()


@pytest.fixture(scope="module")
def decoder(folder):
    return Decoder.load(folder / "target")


@pytest.fixture(scope="module")
def oracle(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def manual(folder):
    """Ids of real text, longer than any prompt here."""
    topics = pydoc_data.topics.topics
    return TextCodec(folder / "target").encode(
        "\n\n".join(topics[k] for k in sorted(topics))[:80_000]
    )


def prompts(manual, lengths):
    """Prompts of the given lengths from different places of the text."""
    return [tuple(manual[97 * i : 97 * i + n]) for i, n in enumerate(lengths)]


def reference(oracle, prompt):
    ids = torch.tensor([prompt])
    out = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def outputs(folder, decoder, mode, requests):
    """Greedy output of each prompt by the server-free loop in a draft mode, γ = 5."""
    pair = Pair.load(folder)
    rule = pair.rule(mode)
    size = {"max_sequences": len(requests), "max_length": 3600}
    target = TorchTarget(decoder, **size)
    draft = None
    if rule is not None:
        rule = MemoryRule.full(3600) if mode is DraftMode.FULL else rule
        adaptor = load_adaptor(folder, decoder, rule) if rule.interval else None
        draft = TorchDraft(decoder, rule, adaptor, **size)
    settings = pair.loop_settings(mode, max_length=3600, rule=rule)
    jobs = [
        GenerationRequest(prompt, NEW_TOKENS, end_ids=decoder.config.eos_ids) for prompt in requests
    ]
    return generate_all(target, draft, settings, jobs)


def test_logits_equal_hugging_face(decoder, oracle, manual):
    ids = list(manual[:400])
    memory = decoder.new_memory(MemoryRule.full(400), 1, 400)
    with torch.inference_mode():
        first, _ = decoder.feed(memory, [0], [ids[:300]])
        second, _ = decoder.feed(memory, [0], [ids[300:]])
        logits = decoder.logits(torch.cat([first, second], 1)[0])
        expected = oracle(torch.tensor([ids])).logits[0]
    assert (logits - expected).abs().max() <= 1e-4


def test_slots_equal_hugging_face(folder, decoder, oracle, manual):
    requests = prompts(manual, TEST_LENGTHS)
    answers = outputs(folder, decoder, DraftMode.SLOTS, requests)
    for prompt, (ids, statistics) in zip(requests, answers, strict=True):
        assert ids == reference(oracle, prompt)
        assert statistics.drafted > 0
    assert sum(statistics.slots_materialized for _, statistics in answers) > 400


@pytest.mark.verify
def test_all_modes_equal_hugging_face_on_20_prompts(folder, decoder, oracle, manual):
    requests = prompts(manual, VERIFY_LENGTHS)
    expected = [reference(oracle, prompt) for prompt in requests]
    for mode in DraftMode:
        found = [ids for ids, _ in outputs(folder, decoder, mode, requests)]
        assert found == expected, mode
