"""The target's engine folder against the recipe, by its config.json alone."""

from __future__ import annotations

from collections.abc import Iterator

from ...engines.engine_folder import EngineFolderError
from ...engines.trtllm_folder import EXTERNAL, LOGITS_DTYPE, EngineConfig, TargetEngine
from ..target_plan import ALGORITHMS
from .finding import Finding, failed, judged, ok, unknown
from .subject import Subject
from .versions import TENSORRT_LLM


def target_engine_findings(subject: Subject) -> list[Finding]:
    """All checks of the engine; one alone where there is none."""
    try:
        engine = EngineConfig.load(subject.places.target_engine)
    except EngineFolderError as error:
        return [failed("target engine", str(error), _again(subject))]
    return [
        _use(subject),
        _version(subject, engine),
        *_speculation(subject, engine),
        *_cache(subject, engine),
        *_sizes(subject, engine),
        *_numbers(subject, engine),
        _ranks(subject, engine),
    ]


def _use(subject: Subject) -> Finding:
    """What the server does at its start; the other checks say all that differs, and why."""
    name, folder, limits = "target engine", subject.places.target_engine, subject.recipe.limits
    try:
        TargetEngine.load(folder).check_use(limits.max_length, limits.max_draft_tokens)
    except EngineFolderError as error:
        return failed(name, str(error), _again(subject))
    return ok(name, f"{folder} can be loaded for this recipe")


def _again(subject: Subject, flags: str = "") -> str:
    """How to build it; a finished engine is in the way of a new one."""
    folder = subject.places.target_engine
    away = f"remove {folder}, then " if folder.exists() else ""
    command = subject.command("target")
    return f"{away}rebuild with {flags} ({command})" if flags else f"{away}build it: {command}"


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
    recipe = subject.recipe
    yield judged(
        "target engine: speculation",
        engine.verifies_drafts,
        f"speculative_decoding_mode is {engine.mode}; draft_tokens_external is {EXTERNAL[0]}",
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
    kind, fmha = engine.kv_cache_type, engine.paged_context
    yield judged(
        "target engine: prefix reuse",
        engine.paged_cache and fmha,
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
    """trtllm-build adds max_draft_len to the max_seq_len that it is given."""
    limits, drafts = subject.recipe.limits, engine.number("max_draft_len")
    length, positions = limits.max_length, limits.max_sequences * (limits.max_draft_tokens + 1)
    for field, least, flag, why in (
        ("max_seq_len", length + drafts, length, "max_length + the engine's max_draft_len"),
        ("max_batch_size", limits.max_sequences, limits.max_sequences, "max_sequences"),
        ("max_num_tokens", positions, positions, "max_sequences x (max_draft_tokens + 1)"),
    ):
        value = engine.number(field)
        found = f"{field} is {value}; limits need {why} = {least}"
        remedy = _again(subject, f"--{field} {flag}")
        yield judged(f"target engine: {field}", value >= least, found, remedy)


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
            engine.logits_dtype == LOGITS_DTYPE,
            f"logits_dtype is {engine.logits_dtype}; the draft's logits are {LOGITS_DTYPE}",
            f"--logits_dtype {LOGITS_DTYPE}",
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
    target = subject.recipe.target
    tensor, pipeline, world = engine.tensor_parallel, engine.pipeline_parallel, engine.ranks
    wanted = (target.tensor_parallel, target.pipeline_parallel)
    files = [f"rank{rank}.engine" for rank in range(target.ranks)]
    absent = [file for file in files if not (subject.places.target_engine / file).is_file()]
    found = f"built for TP {tensor} x PP {pipeline}, world size {world}; the recipe has TP "
    found += f"{wanted[0]} x PP {wanted[1]}"
    found += f"; missing {', '.join(absent)}" if absent else f"; {len(files)} rank files"
    holds = (tensor, pipeline) == wanted and world == target.ranks and not absent
    remedy = _again(subject, f"a checkpoint for TP {wanted[0]} x PP {wanted[1]}")
    return judged("target engine: ranks", holds, found, remedy)
