"""Device memory of target and draft against the decoder's own tensors and known sizes."""

import re

import pytest
import torch

from masw.build.checks.finding import State
from masw.build.checks.machine import Machine
from masw.build.checks.memory import TargetMemory, draft_bytes
from masw.build.checks.subject import Subject
from masw.build.checks.system import shared_memory_needed
from masw.build.draft_scheme import linear_shapes
from masw.build.preflight import preflight
from masw.build.target_plan import TargetPlan
from masw.engines.architectures import architecture
from masw.engines.decoder import Decoder
from masw.engines.places import Places
from masw.engines.recipe import load_recipe

GIB = 2**30


def target_memory(recipe) -> TargetMemory:
    return TargetMemory(TargetPlan(recipe))


def linear_count(model) -> int:
    """Parameters that quantisation makes smaller."""
    return model.layers * sum(inputs * outputs for inputs, outputs in linear_shapes(model))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b"])
def test_target_weights_are_those_of_the_decoder(name):
    """In bfloat16, over all ranks; each of them holds all norms."""
    with torch.device("meta"):
        parameters = list(Decoder(architecture(name)).parameters())
    matrices = sum(p.numel() for p in parameters if p.dim() == 2)
    norms = sum(p.numel() for p in parameters if p.dim() == 1)
    base = load_recipe("llama-3.1-70b-tp4-8b")
    for ranks in (1, 4):
        update = {"architecture": name, "tensor_parallel": ranks, "gpus": tuple(range(ranks))}
        memory = target_memory(
            base.model_copy(update={"target": base.target.model_copy(update=update)})
        )
        assert memory.weight_bytes * ranks == 2 * (matrices + ranks * norms)
    model = architecture(name)
    assert linear_count(model) == matrices - 2 * model.vocab_size * model.hidden_size


def test_known_sizes_of_the_70b_target():
    """320 KiB of keys and values a token (80 layers, 8 heads of 128), a quarter of it on each."""
    memory = target_memory(load_recipe("llama-3.1-70b-tp4-8b"))
    assert memory.token_bytes * 4 == 320 * 1024
    assert memory.sequence_bytes == memory.token_bytes * (32_768 + 16)
    assert memory.weight_bytes / GIB == pytest.approx(141.1e9 / 4 / GIB, rel=0.01)
    more = target_memory(load_recipe("llama-3.1-70b-tp8-3b"))
    assert more.token_bytes * 8 == 320 * 1024


def test_quantization_and_fp8_caches_take_less():
    base = load_recipe("llama-3.1-8b-3b")

    def target(**update):
        return target_memory(
            base.model_copy(update={"target": base.target.model_copy(update=update)})
        )

    sizes = [target(quantization=q).weight_bytes for q in ("none", "fp8", "nvfp4", "int4_awq")]
    assert sizes == sorted(sizes, reverse=True)
    linear = linear_count(base.target_config())
    assert sizes[0] - sizes[1] == pytest.approx(linear, rel=1e-4)
    cached = target(quantization="fp8", kv_cache="fp8")
    assert cached.token_bytes * 2 == target().token_bytes
    fp8 = base.model_copy(update={"draft": base.draft.model_copy(update={"quantization": "fp8"})})
    saved = draft_bytes(base) - draft_bytes(fp8)
    assert saved == pytest.approx(linear_count(base.draft_config()), rel=1e-4)  # but for scales


def test_a_shared_gpu_must_leave_the_draft_its_part(tmp_path):
    base = load_recipe("llama-3.1-8b-3b")
    greedy = base.model_copy(update={"target": base.target.model_copy(update={"kv_fraction": 0.9})})
    subject = Subject(greedy, Places(tmp_path), Machine(), gpu_memory=79.0)
    (found,) = [each for each in preflight(subject) if each.name == "memory: target"]
    most = float(re.search(r"target\.kv_fraction to ([\d.]+) or less", found.remedy)[1])
    free = 79 * GIB - target_memory(greedy).loaded_bytes
    assert (1 - most) * free >= draft_bytes(greedy) > (1 - most - 0.01) * free
    fits = base.model_copy(update={"target": base.target.model_copy(update={"kv_fraction": most})})
    (found,) = [
        each
        for each in preflight(Subject(fits, Places(tmp_path), Machine(), gpu_memory=79.0))
        if each.name == "memory: target"
    ]
    assert found.state == State.OK


def test_draft_logits_decide_the_shared_memory(tmp_path):
    stated = load_recipe("llama-3.1-70b-tp4-8b")
    needed = shared_memory_needed(Subject(stated, Places(tmp_path), Machine()))
    assert needed > 2 * 8 * 16 * 128_256 * 4  # both ways, for 8 sequences of 16 draft tokens


@pytest.mark.parametrize(
    ("gib", "state", "words"),
    [
        (30.0, State.FAILED, "more than the 30.0 GiB of a GPU"),
        (37.0, State.FAILED, "holds 0"),
        (50.0, State.OK, "holds 5 of limits.max_sequences 8: long ones will wait"),
        (79.0, State.OK, "holds 15"),
    ],
)
def test_the_cache_must_hold_a_sequence_of_the_greatest_length(gib, state, words, tmp_path):
    """33 GiB of weights on each of four GPUs, 2.5 GiB of cache for 32,768 tokens."""
    stated = load_recipe("llama-3.1-70b-tp4-8b")
    subject = Subject(stated, Places(tmp_path), Machine(), gpu_memory=gib)
    (found,) = [each for each in preflight(subject) if each.name == "memory: target"]
    assert (found.state, found.found.endswith(words)) == (state, True), found
    if state == State.FAILED:
        wanted = "target.tensor_parallel" if gib == 30.0 else "raise target.kv_fraction"
        assert wanted in found.remedy


def test_numbers_that_cannot_be_built_are_told_as_the_build_tells_them(tmp_path):
    stated = load_recipe("llama-3.1-8b-3b")
    wrong = stated.model_copy(
        update={"target": stated.target.model_copy(update={"kv_cache": "fp8"})}
    )
    (found,) = [
        e for e in preflight(Subject(wrong, Places(tmp_path), Machine())) if e.name == "plan"
    ]
    assert found.state == State.FAILED and "target.kv_cache is 'fp8'" in found.found
