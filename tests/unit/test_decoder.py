"""The decoder equals Hugging Face's forward, and refuses by name what it would get wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from masw.engines.config import DecoderConfig, UnsupportedModelError
from masw.engines.decoder import Decoder
from masw.engines.rotary import RotaryTable, inverse_frequencies
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import LLAMA3_ROPE, MAX_POSITIONS, MODELS, hf_config, random_ids, save_model

TOLERANCE = 1e-4
PLACES = [0, 1024, 8192, 60_000, 131_072]
ROPES = {
    "default": {"rope_theta": 10000.0},
    "large theta": {"rope_theta": 1000000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
    "llama3.1": {
        "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 8192},
        "rope_theta": 500000.0,
        "hidden_size": 512,  # head_dim 128
    },
    "llama3.2": {
        "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 8192, "factor": 32.0},
        "rope_theta": 500000.0,
        "hidden_size": 256,  # head_dim 64
    },
}


@pytest.fixture
def changed_model(tmp_path):
    """changed_model(change, name) -> directory of a model whose tensors `change` has edited."""

    def build(change, name="llama"):
        save_model(tmp_path, name)
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return build


def config_of(name="llama", **changes):
    """Our config of a Hugging Face config, by way of its dict as config.json stores it."""
    return DecoderConfig.from_hf(hf_config(name).to_dict() | changes)


def hf_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def feed_in_chunks(decoder, ids, sizes, rows=1, row=0):
    """Logits (len(ids), vocab) of one sequence fed in chunks of `sizes` through a full KV cache."""
    memory = decoder.new_memory(MemoryRule.full(len(ids)), rows, len(ids))
    parts, start = [], 0
    for size in sizes:
        hidden, _ = decoder.feed(memory, [row], [ids[start : start + size]])
        parts.append(decoder.logits(hidden[0]))
        start += size
    assert start == len(ids)
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", [[150], [1] * 20, [64, 1, 65, 20], [149, 1]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_hugging_face(decoder, hf_model, name, sizes):
    ids = random_ids(sum(sizes))
    found = feed_in_chunks(decoder(name), ids, sizes)
    assert found.dtype == torch.float32
    assert (found - hf_logits(hf_model(name), ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["llama-llama3", "qwen3"])
def test_logits_equal_hugging_face_up_to_the_last_position(decoder, hf_model, name):
    ids = random_ids(MAX_POSITIONS)
    found = feed_in_chunks(decoder(name), ids, [512, 511, 1])
    assert (found - hf_logits(hf_model(name), ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_ragged_batches_equal_hugging_face(decoder, hf_model, name):
    """Rows of other lengths, in another order than the memory's, in chunks of other sizes."""
    chunks = [{2: 7, 0: 1}, {0: 3, 1: 30, 2: 1}, {1: 0, 0: 90}, {2: 1, 1: 1, 0: 1}]
    ids = [random_ids(100, seed) for seed in range(3)]
    expected = [hf_logits(hf_model(name), row) for row in ids]
    memory = decoder(name).new_memory(MemoryRule.full(100), 3, 100)
    for chunk in chunks:
        starts = [memory.fed[row] for row in chunk]
        new = [ids[row][s : s + chunk[row]] for row, s in zip(chunk, starts, strict=True)]
        hidden, block = decoder(name).feed(memory, list(chunk), new)
        for i, (row, start) in enumerate(zip(chunk, starts, strict=True)):
            found = decoder(name).logits(hidden[i, : chunk[row]])
            wanted = expected[row][start : start + chunk[row]]
            assert found.shape == wanted.shape
            assert not chunk[row] or (found - wanted).abs().max() <= TOLERANCE
            assert not chunk[row] or block.last_raw[i] == chunk[row] - 1


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_stays_near_float32(model_dir, hf_model, name):
    decoder, ids = Decoder.load(model_dir(name), torch.bfloat16), random_ids(60)
    found = feed_in_chunks(decoder, ids, [50, 1, 9])
    assert decoder.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    expected = hf_logits(hf_model(name), ids)
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() <= 0.05 * expected.std()


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_equals_hugging_face_at_large_positions(rope):
    config = hf_config("llama", max_position_embeddings=131_072, **ROPES[rope])
    ours, theirs = DecoderConfig.from_hf(config.to_dict()), LlamaRotaryEmbedding(config)
    found = inverse_frequencies(ours.rope, ours.head_dim)
    assert torch.allclose(found, theirs.inv_freq, rtol=1e-6, atol=0)
    places, half = torch.tensor([PLACES]), ours.head_dim // 2
    cos, sin = RotaryTable(ours)(places, torch.float32)
    wanted_cos, wanted_sin = theirs(torch.zeros(1), places)
    # A blended frequency (< 0.2) may differ by one ulp: below 2e-3 rad at position 131,072.
    assert torch.allclose(cos[:, 0], wanted_cos, atol=2e-3)
    assert torch.allclose(sin[:, 0, :, half:], wanted_sin[..., half:], atol=2e-3)
    assert torch.equal(sin[..., :half], -sin[..., half:])


def test_rotary_of_older_configs_reads_the_same():
    """`rope_theta` and `rope_scaling` beside each other, `type` instead of `rope_type`."""
    new = config_of("llama-linear").rope
    old = hf_config("llama").to_dict()
    old.pop("rope_parameters", None)
    old |= {"rope_theta": new.theta, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert DecoderConfig.from_hf(old).rope == new


def test_config_reads_the_shape():
    config = config_of("qwen3")
    assert (config.heads, config.kv_heads, config.head_dim, config.hidden_size) == (4, 2, 16, 32)
    assert config.qk_norm and not config.qkv_bias and not config.tied_embeddings
    assert config_of("qwen2").qkv_bias and config_of("qwen2").tied_embeddings
    assert config_of("llama", eos_token_id=[5, 6]).eos_ids == (5, 6)
    assert config_of("llama", eos_token_id=None).eos_ids == ()


def test_generation_config_supplies_the_end_ids(model_dir, tmp_path):
    assert DecoderConfig.load(model_dir("llama")).eos_ids == (2,)
    (tmp_path / "config.json").write_text((model_dir("llama") / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert DecoderConfig.load(tmp_path).eos_ids == (7, 9)


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


REFUSED = [
    ("llama", rope("yarn", factor=4.0), "yarn"),
    ("llama", rope("dynamic", factor=4.0), "dynamic"),
    ("qwen2", rope("longrope", short_factor=[1.0], long_factor=[1.0]), "longrope"),
    ("llama", rope("linear"), "linear.*factor"),
    ("llama", rope("llama3", factor=8.0, low_freq_factor=1.0), "llama3.*high_freq_factor"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", rope("default", partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("llama", rope("linear", factor=2.0, attention_factor=2.0), "attention_factor"),
    ("mistral", {"sliding_window": 4096}, "sliding_window 4096"),
    ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, "sliding_window 64"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("llama", {"attention_bias": True}, "attention_bias"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("llama", {"model_type": "gemma2"}, "gemma2"),
    ("llama", {"model_type": None}, "model_type None"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_unknown_features_are_refused_by_name(name, change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(name, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": None}, "num_attention_heads is None; .* integer from 1 to"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; "),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; "),
        ({"hidden_size": "32"}, "hidden_size is '32'; "),
        ({"hidden_size": 2, "head_dim": None}, "head_dim is 0; "),
        ({"vocab_size": 10**30}, "vocab_size is 10{30}; .* to 2147483647"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; "),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; .* above 0"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; .* JSON object"),
        ({"rope_parameters": {"rope_type": [1]}}, r"rope type \[1\]"),
        (rope("linear", factor="2"), "factor is '2'; .* above 0"),
        (rope("default", rope_theta=[1]), r"rope_theta is \[1\]"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; .* true or false"),
        ({"layer_types": 3}, "layer_types 3"),
        ({"eos_token_id": ["a"]}, r"eos_token_id is \['a'\]; it must be one token id"),
    ],
    ids=str,
)
def test_a_field_of_another_kind_is_refused_with_its_file(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama").to_dict() | change))
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {message}"):
        DecoderConfig.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "holds no JSON object"), ("{", "is no JSON: ")]
)
def test_a_file_that_is_no_config_is_named(tmp_path, name, text, message):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama").to_dict()))
    (tmp_path / name).write_text(text)
    with pytest.raises(UnsupportedModelError, match=rf"/{name} {message}"):
        DecoderConfig.load(tmp_path)


def test_an_unused_sliding_window_is_no_feature():
    assert config_of("qwen2", sliding_window=4096, use_sliding_window=False).family == "qwen2"


def test_a_mistral_config_must_state_its_sliding_window():
    """Hugging Face fills a missing one with 4096."""
    config = hf_config("mistral").to_dict()
    del config["sliding_window"]
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        DecoderConfig.from_hf(config)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"heads 4 .* kv_heads 3"):
        config_of("llama", num_key_value_heads=3)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_missing_tensors_are_refused_by_name(changed_model, name):
    with pytest.raises(UnsupportedModelError, match=name.removeprefix("model.")):
        Decoder.load(changed_model(lambda tensors: tensors.pop(name)))


def test_unexpected_tensors_are_refused_by_name(changed_model):
    extra = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.bias"):
        Decoder.load(changed_model(lambda tensors: tensors.update({extra: torch.zeros(32)})))


def test_tensors_of_another_shape_are_refused_by_name(changed_model):
    norm = "model.norm.weight"
    with pytest.raises(UnsupportedModelError, match=r"norm\.weight"):
        Decoder.load(changed_model(lambda tensors: tensors.update({norm: torch.ones(31)})))


def test_a_directory_without_weights_is_refused(model_dir, tmp_path):
    (tmp_path / "config.json").write_text((model_dir("llama") / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match="safetensors"):
        Decoder.load(tmp_path)


def test_sharded_weights_load(hf_model, decoder, tmp_path):
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert Decoder.load(tmp_path).fingerprint() == decoder("llama").fingerprint()


def test_fingerprint_follows_the_weights_not_their_storage(model_dir, decoder, tmp_path):
    half = Decoder.load(model_dir("llama"), torch.bfloat16)
    assert half.fingerprint() == decoder("llama").fingerprint()
    other = Decoder.load(save_model(tmp_path, "llama", seed=1))
    assert other.fingerprint() != decoder("llama").fingerprint()
    assert decoder("llama-linear").fingerprint() != decoder("llama").fingerprint()


def test_memory_beyond_the_positions_is_refused(decoder):
    with pytest.raises(ValueError, match=f"{MAX_POSITIONS + 1}.*{MAX_POSITIONS}"):
        decoder("llama").new_memory(MemoryRule(), 1, MAX_POSITIONS + 1)
