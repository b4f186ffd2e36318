"""The target's engine folder against the recipe, by its config.json alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engines.trtllm_folder import EXTERNAL
from ..target_plan import ALGORITHMS
from .finding import Finding, failed, judged, unknown
from .subject import Subject
from .versions import TENSORRT_LLM

LOGITS = "float32"  # the type of draft_logits in the repository


@dataclass(frozen=True)
class EngineConfig:
    """What a TensorRT-LLM engine folder's config.json states; absent values are None or empty."""

    version: str | None
    model: dict[str, Any]
    build: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> EngineConfig:
        """Raises ValueError for a file that is no engine's config.json, OSError without one."""
        path = folder / "config.json"
        try:
            data = json.loads(path.read_text())
            return cls(data.get("version"), data["pretrained_config"], data["build_config"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no config.json of an engine: {error!r}") from None

    def number(self, name: str) -> int:
        """A number of the build; 0 where it is absent."""
        return int(self.build.get(name) or 0)

    def plugin(self, name: str) -> Any:
        """A setting of the plugin section; older files write it with an underscore in front."""
        section = self.build.get("plugin_config") or {}
        return section.get(name, section.get(f"_{name}"))


def target_engine_findings(subject: Subject) -> list[Finding]:
    """All checks of the engine; one alone where there is none."""
    folder = subject.places.target_engine
    build = subject.command("target")
    if not (folder / "config.json").is_file():
        return [failed("target engine", f"{folder} has no config.json", f"build it: {build}")]
    try:
        engine = EngineConfig.load(folder)
    except ValueError as error:
        return [failed("target engine", str(error), f"build it again: {build}")]
    return [
        _version(subject, engine),
        *_speculation(subject, engine),
        *_cache(subject, engine),
        *_sizes(subject, engine),
        *_numbers(subject, engine),
        _ranks(subject, engine),
    ]


def _again(subject: Subject, flags: str) -> str:
    """Which flags of trtllm-build to change, and the command that sets them all."""
    return f"rebuild with {flags} ({subject.command('target')})"


def _version(subject: Subject, engine: EngineConfig) -> Finding:
    name, installed = "target engine: version", subject.machine.versions.get("tensorrt-llm")
    if installed is None:
        supported = str(engine.version).startswith(f"{TENSORRT_LLM}.")
        if supported:
            return unknown(name, f"built by {engine.version}; no TensorRT-LLM here to compare")
        found = f"built by {engine.version}; needed {TENSORRT_LLM}.x"
        return failed(name, found, _again(subject, f"TensorRT-LLM {TENSORRT_LLM}.x"))
    found = f"built by {engine.version}, installed {installed}"
    return judged(name, engine.version == installed, found, _again(subject, f"version {installed}"))


def _speculation(subject: Subject, engine: EngineConfig) -> Iterator[Finding]:
    recipe, mode = subject.recipe, engine.build.get("speculative_decoding_mode")
    yield judged(
        "target engine: speculation",
        (mode.lower() if isinstance(mode, str) else mode) in EXTERNAL,
        f"speculative_decoding_mode is {mode}; draft_tokens_external is {EXTERNAL[0]}",
        _again(subject, "--speculative_decoding_mode draft_tokens_external"),
    )
    wanted, most = recipe.limits.max_draft_tokens, engine.number("max_draft_len")
    limit = min(most, recipe.memory.rollback)
    yield judged(
        "draft length",
        wanted <= limit,
        f"limits.max_draft_tokens is {wanted}; the engine's max_draft_len is {most}, "
        f"memory.rollback is {recipe.memory.rollback}",
        _again(subject, f"--max_draft_len {wanted}") + f", or lower it to {limit} in the recipe",
    )


def _cache(subject: Subject, engine: EngineConfig) -> Iterator[Finding]:
    kind = str(engine.build.get("kv_cache_type")).rpartition(".")[2].upper()
    fmha = engine.plugin("use_paged_context_fmha") in (True, "enable")
    yield judged(
        "target engine: prefix reuse",
        kind == "PAGED" and fmha,
        f"kv_cache_type is {kind}, use_paged_context_fmha is {fmha}; each iteration sends the "
        "whole prefix again",
        _again(subject, "--kv_cache_type paged --use_paged_context_fmha enable"),
    )
    block, wanted = engine.plugin("tokens_per_block"), subject.recipe.target.tokens_per_block
    yield judged(
        "target engine: block",
        block == wanted,
        f"tokens_per_block is {block}; target.tokens_per_block is {wanted}",
        _again(subject, f"--tokens_per_block {wanted}") + ", or change the recipe",
    )


def _sizes(subject: Subject, engine: EngineConfig) -> Iterator[Finding]:
    limits = subject.recipe.limits
    length = limits.max_length + limits.max_draft_tokens
    positions = limits.max_sequences * (limits.max_draft_tokens + 1)
    for field, least, why in (
        ("max_seq_len", length, "max_length + max_draft_tokens"),
        ("max_batch_size", limits.max_sequences, "max_sequences"),
        ("max_num_tokens", positions, "max_sequences x (max_draft_tokens + 1)"),
    ):
        value = engine.number(field)
        found = f"{field} is {value}; limits need {why} = {least}"
        flags = f"--{field} {least}"
        yield judged(f"target engine: {field}", value >= least, found, _again(subject, flags))


def _numbers(subject: Subject, engine: EngineConfig) -> Iterator[Finding]:
    target, model = subject.recipe.target, engine.model
    quantization = model.get("quantization") or {}
    cache = quantization.get("kv_cache_quant_algo")
    reusable = cache in (None, "FP8") if target.kv_cache == "auto" else cache == "FP8"
    algorithm, wanted = quantization.get("quant_algo"), ALGORITHMS[target.quantization]
    for name, holds, found, what in (
        (
            "dtype",
            model.get("dtype") == target.dtype,
            f"dtype is {model.get('dtype')}; target.dtype is {target.dtype}",
            f"a checkpoint of dtype {target.dtype}",
        ),
        (
            "quantization",
            algorithm == wanted,
            f"quant_algo is {algorithm}; target.quantization {target.quantization} is {wanted}",
            f"a checkpoint of quantization {target.quantization}",
        ),
        (
            "logits",
            model.get("logits_dtype") == LOGITS,
            f"logits_dtype is {model.get('logits_dtype')}; the draft's logits are {LOGITS}",
            f"--logits_dtype {LOGITS}",
        ),
        (
            "KV dtype",
            reusable,
            f"kv_cache_quant_algo is {cache}; target.kv_cache is {target.kv_cache}",
            f"a checkpoint whose KV cache is {target.kv_cache}",
        ),
    ):
        yield judged(f"target engine: {name}", holds, found, _again(subject, what))


def _ranks(subject: Subject, engine: EngineConfig) -> Finding:
    target, mapping = subject.recipe.target, engine.model.get("mapping") or {}
    tensor, pipeline = mapping.get("tp_size", 1), mapping.get("pp_size", 1)
    world = mapping.get("world_size", tensor * pipeline)
    wanted = (target.tensor_parallel, target.pipeline_parallel)
    files = [f"rank{rank}.engine" for rank in range(target.ranks)]
    absent = [file for file in files if not (subject.places.target_engine / file).is_file()]
    found = f"built for TP {tensor} x PP {pipeline}, world size {world}; the recipe has TP "
    found += f"{wanted[0]} x PP {wanted[1]}"
    found += f"; missing {', '.join(absent)}" if absent else f"; {len(files)} rank files"
    holds = (tensor, pipeline) == wanted and world == target.ranks and not absent
    remedy = _again(subject, f"a checkpoint for TP {wanted[0]} x PP {wanted[1]}")
    return judged("target engine: ranks", holds, found, remedy)
