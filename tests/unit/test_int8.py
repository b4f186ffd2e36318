"""The int8 draft of the cpu lane: near the float draft in what it proposes, equal in the output."""

import copy
import json
import pydoc_data.topics

import pytest
import torch
from torch import nn

from masw.build.embedded_pair import embedded_model
from masw.engines.adaptor import AdaptorConfig
from masw.engines.decoder import Decoder
from masw.engines.int8 import Int8Linear, to_int8
from masw.engines.linear import Linear
from masw.engines.local import generate_all
from masw.engines.messages import DraftCall
from masw.engines.pair import Pair, PairError, load_draft
from masw.engines.recipe import load_recipe
from masw.engines.text import TextCodec
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import random_ids
from tests.pairs import Kind, loop_settings, new_draft, new_target, reference, requests_of

RULE = MemoryRule(16, 16, 16, 4)
NEW = 16


def linear(seed, bias=True):
    torch.manual_seed(seed)
    return nn.Linear(96, 64, bias=bias).requires_grad_(False)


# --- one layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 40)])
def test_a_layer_equals_rounded_weights_times_inputs(bias, shape):
    """Weights in 255 steps for each output; inputs in 127 steps of each row's own span."""
    layer, x = linear(0, bias), torch.randn(*shape, 96)
    step = layer.weight.abs().amax(1, keepdim=True) / 127
    rounded = nn.functional.linear(x, (layer.weight / step).round() * step, layer.bias)
    error = (Int8Linear(layer)(x) - rounded).abs()
    width = 2 * x.abs().amax(-1, keepdim=True) / 127  # of one step of an input
    noise = width / 12**0.5 * layer.weight.norm(dim=1)  # what random rounding adds up to
    assert (error < 6 * noise).all() and error.mean() > 0


def test_a_huge_row_costs_the_others_nothing():
    layer = Int8Linear(linear(1))
    x = torch.randn(1, 2, 96)
    alone = layer(x[:, :1])
    x[:, 1] *= 1e4
    torch.testing.assert_close(layer(x)[:, :1], alone, atol=0.08, rtol=0)
    assert layer(torch.zeros(1, 2, 96)).isfinite().all()


def test_the_dtype_is_the_inputs():
    assert (
        Int8Linear(linear(2).bfloat16())(torch.randn(1, 2, 96).bfloat16()).dtype == torch.bfloat16
    )


# --- the whole draft


def test_every_linear_layer_is_replaced_and_nothing_else(decoder):
    found = to_int8(copy.deepcopy(decoder("qwen2")))
    names = [name for name, m in decoder("qwen2").named_modules() if isinstance(m, Linear)]
    assert [name for name, m in found.named_modules() if isinstance(m, Int8Linear)] == names
    assert "lm_head" in names and torch.equal(
        found.embed_tokens.weight, decoder("qwen2").embed_tokens.weight
    )


@pytest.mark.parametrize("kind", [Kind(), Kind("slots", 7, "materialized"), Kind("full")], ids=str)
def test_output_is_that_of_plain_decoding_and_acceptance_stays(pair, kind):
    prompts = [random_ids(n, seed=n) for n in (15, 33, 49, 130)]
    expected = [reference(pair.hf, ids, NEW) for ids in prompts]
    accepted = {}
    for name in ("float", "int8"):
        draft = new_draft(copy.deepcopy(pair.drafts["same"]), kind)
        if name == "int8":
            to_int8(draft.decoder)
        settings = loop_settings(rule=draft.memory.rule)
        requests = requests_of([tuple(ids) for ids in prompts], NEW, draft_tokens=5)
        answers = generate_all(new_target(pair.target), draft, settings, requests)
        assert [ids for ids, _ in answers] == expected
        assert all(stats.draft_failures == 0 for _, stats in answers)
        accepted[name] = sum(stats.accepted for _, stats in answers)
    assert accepted["int8"] >= 0.8 * accepted["float"] > 10


def test_the_embedded_model_keeps_most_of_its_choices():
    """One scale for all rows of a call would keep half of them."""
    model = embedded_model()
    topics = pydoc_data.topics.topics
    ids = TextCodec(model).encode(topics["objects"][:2000])[:160]
    best = []
    for quantize in (lambda decoder: decoder, to_int8):
        decoder = quantize(Decoder.load(model))
        hidden, _ = decoder.feed(decoder.new_memory(MemoryRule.full(160), 1, 160), [0], [ids])
        best.append(decoder.logits(hidden[0]).argmax(-1))
    assert (best[0] == best[1]).float().mean() > 0.75


# --- pairs


@pytest.fixture
def folder(model_dir, decoder, tmp_path):
    """A pair of a model and itself, with copied projections."""
    own = decoder("llama")
    for role in ("target", "draft"):
        (tmp_path / role).symlink_to(model_dir("llama"))
    own.copy_adaptor(AdaptorConfig(own.fingerprint(), 16, 16, 4)).save(
        tmp_path / "adaptor.safetensors"
    )
    Pair(memory=RULE, max_length=160).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pair_loads_the_draft_that_it_states(folder, dtype):
    for quantization, kind in (("none", Linear), ("int8", Int8Linear)):
        Pair(dtype, RULE, 160, draft_quantization=quantization).save(folder)
        draft = load_draft(folder)
        assert type(draft.decoder.layers[0].mlp.up_proj) is kind
        assert type(draft.decoder.lm_head) is kind
        assert type(draft.adaptor.layers[0].k_proj) is Linear  # mirrored projections stay
        (answer,) = draft.propose([DraftCall(1, 0, random_ids(60), 4)])
        assert len(answer.ids) == 4


def test_files_without_the_field_still_load(folder):
    path = folder / "pair.json"
    data = json.loads(path.read_text())
    assert data.pop("draft_quantization") == "none"
    path.write_text(json.dumps(data))
    assert Pair.load(folder).draft_quantization == "none"


def test_a_recipe_decides():
    recipe = load_recipe("embedded")
    assert Pair.of(recipe).draft_quantization == "none"
    int8 = recipe.draft.model_copy(update={"quantization": "int8"})
    assert Pair.of(recipe.model_copy(update={"draft": int8})).draft_quantization == "int8"


def test_what_a_draft_cannot_have_is_refused_by_name(folder):
    with pytest.raises(PairError, match="draft_quantization is 'int3'; use one of none, int8, fp8"):
        Pair(draft_quantization="int3")
    Pair(memory=RULE, max_length=160, draft_quantization="fp8").save(folder)
    with pytest.raises(PairError, match=r"'fp8'; a torch draft has one of none, int8: compile it"):
        load_draft(folder)
