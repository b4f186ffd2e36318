"""The adaptor file: bit-exact round trip, strict load, and copies that equal the backbone."""

import json
import pickle
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from masw.engines.adaptor import FORMAT, Adaptor, AdaptorConfig, AdaptorError, read_adaptor
from masw.engines.decoder import Decoder
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import MODELS, VOCAB, random_ids, save_model

HEADER = {
    "sink": 16,
    "window": 24,
    "interval": 4,
    "visibility": "materialized",
    "slot_embedding": 7,
    "offset": True,
    "low_rank": 0,
    "trained": True,
}


def randomised(decoder, dtype=torch.float32, **header):
    """An adaptor of random values, the offset included."""
    config = AdaptorConfig(decoder.fingerprint(), **HEADER | header)
    adaptor = decoder.copy_adaptor(config).to(dtype).requires_grad_(False)
    for parameter in adaptor.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    return adaptor


@pytest.fixture
def saved(decoder, tmp_path):
    """A random adaptor of the Qwen2 model (it has biases), and its file."""
    adaptor = randomised(decoder("qwen2"))
    adaptor.save(tmp_path / "adaptor.safetensors")
    return adaptor, tmp_path / "adaptor.safetensors"


@pytest.fixture
def rewritten(saved):
    """rewritten(tensors=..., header=..., format=...) -> the file with those parts edited."""
    adaptor, path = saved

    def rewrite(tensors=lambda tensors: None, header=lambda header: None, format=FORMAT):
        content, values = load_file(path), asdict(adaptor.config)
        tensors(content)
        header(values)
        save_file(content, path, metadata={"masw": json.dumps(values | {"format": format})})
        return path

    return rewrite


@pytest.fixture
def load(decoder):
    """load(path) -> the adaptor of a file, for the Qwen2 model."""
    model = decoder("qwen2")
    return lambda path: Adaptor.load(path, model.config, model.fingerprint())


def same_bits(a, b):
    width = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(width), b.view(width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_round_trip_is_bit_exact(decoder, tmp_path, name, dtype):
    adaptor = randomised(decoder(name), dtype)
    adaptor.layers[0].k_proj.weight[0, :3] = torch.tensor([-0.0, float("inf"), float("nan")])
    adaptor.save(tmp_path / "a.safetensors")
    loaded = Adaptor.load(
        tmp_path / "a.safetensors", decoder(name).config, decoder(name).fingerprint()
    )
    assert loaded.config == adaptor.config
    before, after = adaptor.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(same_bits(before[key], after[key]) for key in before)


def test_saving_twice_gives_the_same_file_and_leaves_no_other(saved, tmp_path):
    adaptor, path = saved
    first = path.read_bytes()
    adaptor.save(path)
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_header_states_everything(saved):
    adaptor, path = saved
    config, tensors = read_adaptor(path)
    assert asdict(config) == HEADER | {"base": adaptor.config.base}
    assert config.rule(rollback=9) == MemoryRule(16, 24, 9, 4, "materialized")
    assert len(tensors) == 2 * 2 * 2 + 1  # layers x (k, v) x (weight, bias), offset


def test_biases_are_mirrored_where_the_backbone_has_them(decoder):
    assert randomised(decoder("qwen2")).layers[0].k_proj.bias is not None
    assert randomised(decoder("llama")).layers[0].k_proj.bias is None


# --- strict load

K = "layers.1.k_proj.weight"


@pytest.mark.parametrize("name", [K, "layers.0.v_proj.bias", "offset"])
def test_a_missing_tensor_is_refused_by_name(rewritten, load, name):
    with pytest.raises(AdaptorError, match=f"lacks tensor {name}"):
        load(rewritten(lambda tensors: tensors.pop(name)))


@pytest.mark.parametrize("name", ["layers.2.k_proj.weight", "layers.0.q_proj.weight"])
def test_an_unexpected_tensor_is_refused_by_name(rewritten, load, name):
    with pytest.raises(AdaptorError, match=f"unexpected tensor {name}"):
        load(rewritten(lambda tensors: tensors.update({name: torch.zeros(2)})))


def test_an_offset_that_the_header_denies_is_refused(rewritten, load):
    with pytest.raises(AdaptorError, match="unexpected tensor offset"):
        load(rewritten(header=lambda header: header.update(offset=False)))


def test_a_tensor_of_another_shape_is_refused_by_name(rewritten, load):
    with pytest.raises(AdaptorError, match=rf"{K} is \(3, 3\), the model needs \(16, 32\)"):
        load(rewritten(lambda tensors: tensors.update({K: torch.zeros(3, 3)})))


def test_another_base_model_is_refused(saved, tmp_path):
    _, path = saved
    other = Decoder.load(save_model(tmp_path / "other", "qwen2", seed=1))
    with pytest.raises(AdaptorError, match=f"not {other.fingerprint()[:12]}"):
        Adaptor.load(path, other.config, other.fingerprint())


def test_another_format_is_refused_by_name(rewritten, load):
    with pytest.raises(AdaptorError, match=f"masw-adaptor-99.*{FORMAT}"):
        load(rewritten(format="masw-adaptor-99"))


def test_a_file_of_another_kind_is_refused(model_dir, load):
    with pytest.raises(AdaptorError, match=r"model\.safetensors has format"):
        load(model_dir("qwen2") / "model.safetensors")


def write_pickle(path):
    path.write_bytes(pickle.dumps({K: [1.0]}))


def write_torch(path):
    torch.save({K: torch.zeros(2)}, path)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def truncate_header(path):
    path.write_bytes(path.read_bytes()[:20])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [write_pickle, write_torch, truncate, truncate_header, empty])
def test_a_file_that_is_not_whole_safetensors_is_refused(saved, load, damage):
    _, path = saved
    damage(path)
    with pytest.raises(AdaptorError, match=r"adaptor\.safetensors is not a safetensors file"):
        load(path)


def test_a_missing_file_is_refused_by_name(load, tmp_path):
    with pytest.raises(AdaptorError, match="nowhere"):
        load(tmp_path / "nowhere.safetensors")


def test_an_unknown_header_key_is_refused_by_name(rewritten, load):
    with pytest.raises(AdaptorError, match="query_rank"):
        load(rewritten(header=lambda header: header.update(query_rank=8)))


@pytest.mark.parametrize("key", [*HEADER, "base"])
def test_a_missing_header_key_is_refused_by_name(rewritten, load, key):
    """Nothing is filled in: a file without its visibility or interval would run, wrongly."""
    with pytest.raises(AdaptorError, match=key):
        load(rewritten(header=lambda header: header.pop(key)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("interval", 0),
        ("interval", "8"),
        ("sink", -1),
        ("window", 0),
        ("visibility", "sometimes"),
        ("slot_embedding", "mean"),
        ("slot_embedding", -1),
        ("slot_embedding", VOCAB),
    ],
)
def test_a_bad_header_value_is_refused_by_name(rewritten, load, key, value):
    with pytest.raises(AdaptorError, match=key):
        load(rewritten(header=lambda header: header.update({key: value})))


@pytest.mark.parametrize("text", ["{", "[1]", "null", ""])
def test_a_header_that_is_no_json_object_is_refused(saved, load, text):
    _, path = saved
    save_file(load_file(path), path, metadata={"masw": text})
    with pytest.raises(AdaptorError, match="header"):
        load(path)


# --- what an untrained adaptor is


def outputs(decoder, rule, ids, adaptor):
    """Hidden states, keys and values of a sequence in two blocks."""
    memory = decoder.new_memory(rule, 1, len(ids))
    first, _ = decoder.feed(memory, [0], [ids[:50]], adaptor)
    second, _ = decoder.feed(memory, [0], [ids[50:]], adaptor)
    return first, second, memory.k, memory.v


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_equals_no_adaptor_and_the_backbone(decoder, name):
    model = decoder(name)
    copy = model.copy_adaptor(AdaptorConfig(model.fingerprint(), 16, 16, 4))
    for mirror, layer in zip(copy.layers, model.layers, strict=True):
        assert torch.equal(mirror.k_proj.weight, layer.self_attn.k_proj.weight)
        assert torch.equal(mirror.v_proj.weight, layer.self_attn.v_proj.weight)
    rule, ids = copy.config.rule(), random_ids(70)
    with_copy, without = outputs(model, rule, ids, copy), outputs(model, rule, ids, None)
    for a, b in zip(with_copy, without, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_a_random_adaptor_changes_the_output(decoder):
    """The slots are seen at all: else every equality above would be empty."""
    model = decoder("llama")
    adaptor = randomised(model, slot_embedding="last_token", offset=False)
    rule, ids = adaptor.config.rule(), random_ids(70)
    _, changed, _, _ = outputs(model, rule, ids, adaptor)
    _, plain, _, _ = outputs(model, rule, ids, None)
    assert (changed - plain).abs().max() > 0.1


def test_a_copy_shares_nothing_with_the_backbone(decoder):
    model = decoder("llama")
    before = model.layers[0].self_attn.k_proj.weight.clone()
    copy = model.copy_adaptor(AdaptorConfig(model.fingerprint())).requires_grad_(False)
    copy.layers[0].k_proj.weight.zero_()
    assert torch.equal(model.layers[0].self_attn.k_proj.weight, before)


def test_a_copy_has_the_dtype_of_the_model(model_dir):
    model = Decoder.load(model_dir("qwen2"), torch.bfloat16)
    adaptor = model.copy_adaptor(AdaptorConfig(model.fingerprint(), 16, 16, 4, offset=True))
    assert {parameter.dtype for parameter in adaptor.parameters()} == {torch.bfloat16}
    hidden, _, _, _ = outputs(model, adaptor.config.rule(), random_ids(60), adaptor)
    assert hidden.dtype == torch.bfloat16
