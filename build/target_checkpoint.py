"""The TensorRT-LLM checkpoint of a target: one file per rank, written by ModelOpt on the CPU.

ModelOpt cuts and packs the weights. Its config.json is completed with what TensorRT-LLM reads and
ModelOpt leaves out or sets otherwise (RoPE, logits in float32, Qwen's keys), and what it says of
the tensors is compared with the plan, as are the tensors themselves.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from ..engines import architectures
from ..engines.text import TextCodec
from .calibration import Calibration
from .modelopt import check_modelopt, modelopt, quantize
from .output_folder import GIB, check_space, staged, write_provenance
from .progress import Say
from .target_folder import CONFIG, CheckpointError, check_rank, complete, model_fingerprint
from .target_plan import TargetPlan

DECODER_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen", "qwen3": "qwen"}


@dataclass(frozen=True)
class CheckpointJob:
    """What is written from what. log: file that takes everything ModelOpt prints."""

    plan: TargetPlan
    model: Path
    out: Path
    log: Path
    calibration: Calibration | None = None

    def check(self) -> None:
        """Raises ValueError for what would fail later: folder, weights, text, disk, memory."""
        plan = self.plan
        architectures.check_model_folder(self.model)
        architectures.check_folder(plan.target.architecture, self.model)
        if not any(self.model.glob("*.safetensors")):
            raise ValueError(f"{self.model} has no weights: no *.safetensors lies there")
        if plan.needs_calibration and self.calibration is None:
            raise ValueError(
                f"target.quantization {plan.target.quantization} measures scales on text; give "
                "--calibration FILE (.txt or .jsonl) like what the target will read"
            )
        check_space(self.out, plan.checkpoint_bytes, "the checkpoint")
        free = psutil.virtual_memory().available
        if free < plan.model_bytes:
            raise ValueError(
                f"the model takes {plan.model_bytes / GIB:,.1f} GiB of memory, "
                f"{free / GIB:,.1f} GiB are free; use a machine with more"
            )
        check_modelopt()


def write_checkpoint(job: CheckpointJob, say: Say) -> Path:
    """Writes the checkpoint folder of a checked job; it appears whole or not at all.

    Raises CheckpointError where ModelOpt fails or writes another thing than the plan says.
    """
    started = datetime.now(UTC)
    sequences = _sequences(job)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with staged(job.out) as stage:
        with _logged(job.log):
            say(f"reading weights; output in {job.log}")
            model = _load(job)
            if sequences:
                model = _quantize(job, model, sequences, say)
            say(f"writing {job.plan.target.ranks} rank files")
            _export(job.plan, model, stage)
        say("checking the tensors of every rank")
        _complete_config(job.plan, stage)
        for rank in range(job.plan.target.ranks):
            check_rank(job.plan, stage, rank)
        facts = {"calibration": job.calibration.as_dict()} if sequences else {}
        source = model_fingerprint(job.model)
        write_provenance(stage, started, model=source, modelopt=_version(), **facts)
    return job.out


def _sequences(job: CheckpointJob) -> list[list[int]]:
    if not job.plan.needs_calibration:
        return []
    return job.calibration.sequences(TextCodec(job.model).tokenizer)


def _load(job: CheckpointJob) -> torch.nn.Module:
    """The model on the CPU; spread over the GPUs where there are some and it is calibrated."""
    from transformers import AutoModelForCausalLM

    place = "auto" if job.plan.needs_calibration and torch.cuda.is_available() else None
    dtype = getattr(torch, job.plan.target.dtype)
    model, told = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=dtype, device_map=place, output_loading_info=True
    )
    missing = sorted(told["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{job.model} lacks {len(missing)} of the model's tensors, {missing[0]} among them; "
            "get its files again"
        )
    return model.eval()


def _quantize(
    job: CheckpointJob, model: torch.nn.Module, sequences: list[list[int]], say: Say
) -> torch.nn.Module:
    target = job.plan.target
    passes = len(sequences) * (2 if target.quantization == "int4_awq" else 1)
    step = max(1, passes // 10)

    def tick(done: int) -> None:
        if done % step == 0 or done == passes:
            say(f"calibrating {done}/{passes}")

    model = quantize(model, target.quantization, target.kv_cache, sequences, tick)
    if torch.cuda.is_available():
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(model, recurse=True)
    return model


def _export(plan: TargetPlan, model: torch.nn.Module, stage: Path) -> None:
    target = plan.target
    with torch.inference_mode():
        modelopt("export").export_tensorrt_llm_checkpoint(
            model,
            DECODER_TYPES[plan.model.family],
            getattr(torch, target.dtype),
            export_dir=stage,
            inference_tensor_parallel=target.tensor_parallel,
            inference_pipeline_parallel=target.pipeline_parallel,
        )


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Sends what is printed to the log; a failure names it."""
    with path.open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            yield
        except (ImportError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise CheckpointError(
                f"ModelOpt could not write the checkpoint ({type(error).__name__}: {error}); its "
                f"output is in {path}"
            ) from error


def _complete_config(plan: TargetPlan, stage: Path) -> None:
    """Completes config.json, after comparing what ModelOpt says of the tensors with the plan."""
    path = stage / CONFIG
    written = json.loads(path.read_text())
    completed = complete(written, plan.config)
    path.write_text(json.dumps(completed, indent=2) + "\n")
    (stage / "quant_cfg.json").unlink(missing_ok=True)  # only mixed precision has a use for it


def _version() -> str:
    return importlib.metadata.version("nvidia-modelopt")
