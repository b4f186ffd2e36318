"""Recipes: the shipped ones load and state real architectures; every wrong field is named."""

import copy
import json

import pytest
import torch
import transformers
import yaml

from masw.engines import architectures
from masw.engines.decoder import Decoder
from masw.engines.places import Places
from masw.engines.recipe import Lane, Recipe, RecipeError, load_recipe, recipe_folder, recipe_names

GPU = {
    "name": "pair",
    "lane": "gpu",
    "target": {"architecture": "llama-3.1-8b", "gpus": [0]},
    "draft": {"architecture": "llama-3.2-3b", "gpu": 0},
}
CPU = {"name": "pair", "lane": "cpu", "target": {"dtype": "float32"}, "draft": {"dtype": "float32"}}


def with_value(recipe: dict, field: str, value) -> dict:
    """A copy in which the dotted field has the value."""
    changed = copy.deepcopy(recipe)
    *parts, last = field.split(".")
    place = changed
    for part in parts:
        place = place.setdefault(part, {})
    place[last] = value
    return changed


def load(folder, data) -> Recipe:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    return load_recipe(str(path))


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load_and_are_named_like_their_file(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    if recipe.lane == Lane.GPU:
        assert len(recipe.target.gpus) == recipe.target.ranks
        assert recipe.target_config().vocab_size == recipe.draft_config().vocab_size
        for config in (recipe.target_config(), recipe.draft_config()):
            assert recipe.limits.max_length <= config.max_positions


def test_every_kind_of_deployment_is_shipped():
    shipped = {load_recipe(name) for name in recipe_names()}
    kinds = {(r.lane, r.target.architecture, r.target.ranks, r.draft.architecture) for r in shipped}
    assert kinds == {
        ("cpu", None, 1, None),
        ("gpu", "llama-3.1-8b", 1, "llama-3.2-3b"),
        ("gpu", "llama-3.1-70b", 4, "llama-3.1-8b"),
        ("gpu", "llama-3.1-70b", 8, "llama-3.2-3b"),
    }


@pytest.mark.parametrize("name", [n for n in recipe_names() if load_recipe(n).lane == Lane.GPU])
def test_numbers_are_those_of_the_architectures(name):
    """By Hugging Face's own reading of the same entries, and the size that they add up to."""
    recipe = load_recipe(name)
    published = {"llama-3.2-3b": 3.21e9, "llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.55e9}
    entries = yaml.safe_load((recipe_folder() / architectures.FILE).read_text())
    for part, config in (
        (recipe.target, recipe.target_config()),
        (recipe.draft, recipe.draft_config()),
    ):
        stated = {k: v for k, v in entries[part.architecture].items() if k != "source"}
        theirs = transformers.AutoConfig.for_model(**stated)
        assert (config.layers, config.heads) == (
            theirs.num_hidden_layers,
            theirs.num_attention_heads,
        )
        assert (config.kv_heads, config.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
        with torch.device("meta"):
            count = sum(p.numel() for p in Decoder(config).parameters())
        assert count == pytest.approx(published[part.architecture], rel=0.002)
        assert architectures.source(part.architecture).startswith("meta-llama/")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "A b", r"name is 'A b': String should match pattern"),
        ("lane", "tpu", r"lane is 'tpu': Input should be 'cpu' or 'gpu'"),
        ("target.architecture", "gpt", r"target\.architecture is 'gpt'; known: llama-3\.2-3b"),
        ("target.dtype", "float32", r"target\.dtype is 'float32'; lane gpu has one of bfloat16"),
        ("target.quantization", "int8", r"target\.quantization is 'int8'.*one of none, fp8"),
        ("target.kv_cache", "int8", r"target\.kv_cache is 'int8'.*one of auto, fp8"),
        (
            "target.tensor_parallel",
            0,
            r"target\.tensor_parallel is 0: .*or equal to 1",
        ),
        ("target.tensor_parallel", 2, r"target\.gpus is \[0\]; tensor_parallel 2.*2 different"),
        ("target.pipeline_parallel", 0, r"target\.pipeline_parallel is 0: .*or equal to 1"),
        ("target.gpus", [-1], r"target\.gpus\.0 is -1: .*or equal to 0"),
        ("target.kv_fraction", 1.0, r"target\.kv_fraction is 1\.0: .*less than 1"),
        ("target.kv_fraction", 0, r"target\.kv_fraction is 0: .*greater than 0"),
        ("target.tokens_per_block", 48, r"target\.tokens_per_block is 48; use a power of two"),
        ("target.max_draft_len", 0, r"target\.max_draft_len is 0: .*or equal to 1"),
        ("target.max_draft_len", 8, r"max_draft_tokens is 16; .*target\.max_draft_len 8"),
        ("target.max_num_tokens", 0, r"target\.max_num_tokens is 0: .*or equal to 1"),
        ("draft.architecture", None, r"draft\.architecture is None; known: llama-3\.2-3b"),
        ("draft.dtype", "int8", r"draft\.dtype is 'int8'; lane gpu has one of bfloat16, float16"),
        ("draft.quantization", "nvfp4", r"draft\.quantization is 'nvfp4'.*none, fp8, int4_awq"),
        ("draft.gpu", -1, r"draft\.gpu is -1: .*or equal to 0"),
        ("memory.sink", -1, r"memory: sink is -1; it must be 0 or more"),
        ("memory.rollback", 0, r"memory: rollback is 0; a rule with a window needs 1 or more"),
        (
            "memory.rollback",
            8,
            r"max_draft_tokens is 16; .* memory\.rollback is 8",
        ),
        ("memory.sink", "a", r"memory: sink is 'a'; it must be an integer of 0 or more"),
        ("memory.sink", 10**30, r"memory: sink is 10{30}; it must be 16777216 or less"),
        ("memory.window", 1.5, r"memory: window is 1\.5; it must be an integer"),
        ("memory.interval", True, r"memory: interval is True; it must be an integer"),
        ("memory.visibility", "never", r"visibility is 'never'; use one of materialized, evicted"),
        ("memory", 5, r"memory is 5: .*MemoryRule"),
        ("memory.stride", 8, r"memory: unknown stride; known: .*'interval'"),
        ("limits.max_length", 0, r"limits\.max_length is 0: .*or equal to 1"),
        ("limits.max_sequences", "many", r"limits\.max_sequences is 'many': .*valid integer"),
        ("limits.max_waiting", -1, r"limits\.max_waiting is -1: .*or equal to 0"),
        ("limits.draft_tokens", -1, r"limits\.draft_tokens is -1: .*or equal to 0"),
        ("limits.draft_tokens", 17, r"limits\.draft_tokens is 17; limits\.max_draft_tokens is 16"),
        ("limits.max_draft_tokens", 0, r"limits\.max_draft_tokens is 0: .*or equal to 1"),
        ("limits.chunk", 0, r"limits\.chunk is 0: .*or equal to 1"),
        ("limits.time_limit", 0, r"limits\.time_limit is 0: .*greater than 0"),
        ("serving.decoupled", "perhaps", r"serving\.decoupled is 'perhaps': .*valid boolean"),
        ("serving.launch", "slurm", r"serving\.launch is 'slurm': .*'leader' or 'orchestrator'"),
        ("serving.http_port", 70_000, r"serving\.http_port is 70000: .*or equal to 65535"),
        ("serving.http_port", True, r"serving\.http_port is True: .*valid integer"),
        ("limits.time_limit", True, r"limits\.time_limit is True: .*valid number"),
        ("target.kv_fraction", "0.5", r"target\.kv_fraction is '0\.5': .*valid number"),
        ("serving.grpc_port", 0, r"serving\.grpc_port is 0: .*or equal to 1"),
        ("serving.metrics_port", "a", r"serving\.metrics_port is 'a': .*valid integer"),
        ("target.gamma", 5, r"target\.gamma is 5: Extra inputs are not permitted"),
        ("package", {"package": "p", "file": "f", "directory": "d"}, r"only the cpu lane has one"),
        ("package", {"package": "p"}, r"package\.file: Field required"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_limit(tmp_path, field, value, message):
    load(tmp_path, GPU)  # right without the change
    with pytest.raises(RecipeError, match=message) as refused:
        load(tmp_path, with_value(GPU, field, value))
    assert str(refused.value).startswith("mine.yaml: ")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target.dtype", "float16", r"target\.dtype is 'float16'; lane cpu has one of float32"),
        ("draft.dtype", "bfloat16", r"draft\.dtype is 'bfloat16'; lane cpu has one of float32"),
        ("target.quantization", "fp8", r"target\.quantization is 'fp8'; lane cpu has one of none"),
        ("draft.quantization", "fp8", r"draft\.quantization is 'fp8'.*one of none, int8"),
    ],
)
def test_what_the_cpu_lane_lacks_is_named(tmp_path, field, value, message):
    load(tmp_path, CPU)
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, with_value(CPU, field, value))


def test_all_wrong_fields_are_told_at_once(tmp_path):
    wrong = with_value(with_value(GPU, "limits.chunk", 0), "serving.http_port", 0)
    with pytest.raises(RecipeError, match=r"limits\.chunk is 0.*; serving\.http_port is 0"):
        load(tmp_path, wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty or no mapping"),
        ("- a", "is empty or no mapping"),
        ("a: [", "is no YAML"),
        ("{}", "name: Field required; lane: Field required"),
        ("name: a\nlane: cpu\nname: b", "key 'name' is given twice.* line 3"),
        ("name: a\nmemory: {sink: 1, sink: 2}", "key 'sink' is given twice.* line 2"),
        ("name: 2020-13-45", "is no YAML: month must be in 1..12"),
        ("[" * 10_000, "is no YAML: .*recursion"),
        ("{name: a, lane: cpu, 1: 2}", "1 is 1: Keys should be strings"),
        ("{name: a, lane: cpu, memory: {1: 2, foo: 3}}", "memory: unknown 1, foo; known"),
        ("{name: a, lane: cpu, limits: {1: 2}}", "limits.1 is 1: Keys should be strings"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=rf"^mine\.yaml.* {message}"):
        load_recipe(str(path))


@pytest.mark.parametrize("name", ["nowhere", "architectures", "nowhere.yaml"])
def test_an_unknown_recipe_lists_the_shipped_ones(name):
    with pytest.raises(RecipeError, match=f"'{name}' does not exist.*embedded, llama-3.1-70b"):
        load_recipe(name)


def test_a_recipe_cannot_change_and_round_trips_through_json():
    recipe = load_recipe("llama-3.1-70b-tp4-8b")
    with pytest.raises(ValueError, match="frozen"):
        recipe.limits.chunk = 1
    assert Recipe(**json.loads(recipe.model_dump_json())) == recipe


def test_places_are_apart_and_below_the_root(tmp_path):
    names = [name for name, value in vars(Places).items() if isinstance(value, property)]
    found = [getattr(Places(tmp_path), name) for name in names]
    assert len(set(found)) == len(names) == 9
    assert all(tmp_path in place.parents for place in found)


def test_three_ports_are_three_numbers_and_slips_of_size_are_refused(tmp_path):
    path = tmp_path / "own.yaml"
    for text, message in (
        ("serving: {http_port: 8001}", "http_port, grpc_port, metrics_port are"),
        ("limits: {max_length: true}", "limits.max_length is True"),
        ("limits: {max_length: 1000000000000}", "limits.max_length is 1000000000000"),
        ("limits: {time_limit: .inf}", "limits.time_limit is inf"),
        ("draft: {gpu: 20000000}", "draft.gpu is 20000000"),
    ):
        path.write_text(f"name: own\nlane: cpu\n{text}\n")
        with pytest.raises(RecipeError, match=message):
            load_recipe(str(path))
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(RecipeError, match=r"own\.yaml is no YAML: .*decode"):
        load_recipe(str(path))


def test_a_model_of_ones_own_is_named_by_its_config_json(tmp_path):
    """A pair beyond the shipped architectures needs nothing but the models' own files."""
    config = transformers.Qwen2Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=1e6,
    )
    file = tmp_path / "config.json"
    config.to_json_file(file)
    own = copy.deepcopy(GPU)
    own["target"]["architecture"] = own["draft"]["architecture"] = str(file)
    found = Recipe(**own).target_config()
    assert (found.family, found.layers, found.qkv_bias) == ("qwen2", 4, True)
    for content, message in (
        (None, "No such file"),
        ("[]", "holds no JSON object"),
        ('{"model_type": "t5"}', "t5"),
    ):
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(ValueError, match=rf"target\..*{message}"):
            Recipe(**own)
