"""A whole gpu deployment of tiny models, engines as doubles, and a machine that could serve it.

The target engine's config.json has the shape that TensorRT-LLM 1.2 writes; the draft's folder is a
real one but for the engine's bytes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from masw.build.checks.finding import Finding, State
from masw.build.checks.machine import Gpu, Machine
from masw.build.deployment import lay_out
from masw.build.triton_server import free_ports
from masw.engines import architectures
from masw.engines.adaptor import AdaptorConfig
from masw.engines.decoder import Decoder
from masw.engines.draft_io import DraftIO
from masw.engines.engine_folder import ENGINE, Builder, DraftEngine, file_sha256
from masw.engines.places import Places
from masw.engines.recipe import Lane, Recipe, load_recipe, recipe_names
from masw.engines.tokens import tokens_sha256
from tests.models import hf_config, save_model
from tests.tiny_tokenizers import byte_level

TARGET, DRAFT = "llama", "llama-tied"  # architectures by the names of `tests.models`
TENSORRT = "10.14.1.48"
GPUS = tuple(Gpu(index, "H100", "9.0", 79.0) for index in range(3))
MACHINE = Machine(
    versions={"tensorrt-llm": "1.2.1", "tensorrt": TENSORRT},
    gpus=GPUS,
    cuda=(13, 0),
    container="26.04",
    mpirun="/usr/bin/mpirun",
    shared_memory=8 * 2**30,
)
MEMORY = {"sink": 16, "window": 16, "rollback": 16, "interval": 8}
LIMITS = {"max_length": 512, "max_sequences": 2, "max_draft_tokens": 8, "chunk": 64}
GPU_RECIPES = [name for name in recipe_names() if load_recipe(name).lane == Lane.GPU]  # shipped


def tiny_architectures() -> dict[str, dict]:
    """What stands in for architectures.yaml."""
    return {
        name: {**json.loads(hf_config(name).to_json_string(use_diff=False)), "source": f"x/{name}"}
        for name in (TARGET, DRAFT)
    }


def recipe(**parts) -> Recipe:
    """A recipe of two ranks, the draft on a third GPU; parts: changes, section by section."""
    http, grpc, metrics = free_ports()
    sections = {
        "target": {
            "architecture": TARGET,
            "tensor_parallel": 2,
            "gpus": [0, 1],
            "max_draft_len": 8,
            "max_num_tokens": 256,
        },
        "draft": {"architecture": DRAFT, "gpu": 2},
        "memory": MEMORY,
        "limits": LIMITS,
        "serving": {"http_port": http, "grpc_port": grpc, "metrics_port": metrics},
    }
    for name, changes in parts.items():
        sections[name] = sections[name] | changes
    return Recipe(name="tiny", lane="gpu", **sections)


def target_config(stated: Recipe) -> dict:
    """config.json of the recipe's target engine."""
    target, limits = stated.target, stated.limits
    mapping = {"world_size": 2, "tp_size": 2, "pp_size": 1}
    return {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": target.dtype,
            "logits_dtype": "float32",
            "vocab_size": stated.target_config().vocab_size,
            "mapping": mapping,
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        },
        "build_config": {
            "max_input_len": limits.max_length,
            "max_seq_len": limits.max_length + target.max_draft_len,
            "max_batch_size": limits.max_sequences,
            "max_num_tokens": target.max_num_tokens,
            "max_draft_len": target.max_draft_len,
            "speculative_decoding_mode": 2,
            "kv_cache_type": "PAGED",
            "plugin_config": {"use_paged_context_fmha": True, "tokens_per_block": 32},
        },
    }


def write_deployment(root: Path, stated: Recipe) -> Places:
    """Everything below `root`; `architectures` must know the tiny models."""
    places = Places(root)
    for folder, name in ((places.target_model, TARGET), (places.draft_model, DRAFT)):
        save_model(folder, name)
        byte_level(folder)
    decoder = Decoder.load(places.draft_model)
    header = AdaptorConfig(decoder.fingerprint(), 16, 16, 8, trained=True)
    decoder.copy_adaptor(header).save(places.adaptor)
    _write_draft_engine(places, stated, decoder)
    places.target_engine.mkdir(parents=True)
    (places.target_engine / "config.json").write_text(json.dumps(target_config(stated)))
    for rank in range(stated.target.ranks):
        (places.target_engine / f"rank{rank}.engine").write_bytes(b"engine")
    lay_out(stated, places)
    return places


def _write_draft_engine(places: Places, stated: Recipe, decoder: Decoder) -> None:
    io = DraftIO.of(
        architectures.architecture(DRAFT),
        stated.memory,
        max_sequences=2,
        max_length=512,
        dtype="bfloat16",
        chunk=64,
        logits=True,
    )
    engine = DraftEngine(
        decoder.config,
        io,
        16,
        Builder("tensorrt", TENSORRT, "plugin", "9.0"),
        decoder.fingerprint(),
        file_sha256(places.adaptor),
        tokens_sha256(places.draft_model / "tokenizer.json"),
    )
    places.draft_engine.mkdir(parents=True)
    engine.write(places.draft_engine)
    (places.draft_engine / ENGINE).write_bytes(b"engine")


def copy_deployment(places: Places, root: Path, stated: Recipe) -> Places:
    """The same files below another root."""
    shutil.copytree(places.root, root, symlinks=True)
    lay_out(stated, Places(root))
    return Places(root)


def failures(findings: dict[str, Finding]) -> dict[str, Finding]:
    """Those of the findings by name that are failures."""
    return {name: each for name, each in findings.items() if each.state == State.FAILED}


def change_json(path: Path, **changes) -> None:
    """Sets values of a JSON file by dotted names (`__` for the dot)."""
    data = json.loads(path.read_text())
    for name, value in changes.items():
        *parts, last = name.split("__")
        place = data
        for part in parts:
            place = place[part]
        place[last] = value
    path.write_text(json.dumps(data))
