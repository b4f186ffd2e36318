"""The engine folder of a TensorRT-LLM target: what its config.json states, and what is refused.

config.json       version, pretrained_config, build_config, as trtllm-build writes them
rank<N>.engine    one for each of the tensor parallel x pipeline parallel ranks
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .engine_folder import CONFIG, EngineFolderError

EXTERNAL = (2, "2", "draft_tokens_external")  # SpeculativeDecodingMode.DRAFT_TOKENS_EXTERNAL


@dataclass(frozen=True)
class TargetEngine:
    """What a built target allows. Lengths in tokens; tensor_parallel of `ranks` processes."""

    vocab_size: int
    max_seq_len: int
    max_draft_len: int
    logits_dtype: str = "float32"
    tensor_parallel: int = 1
    ranks: int = 1

    @property
    def max_length(self) -> int:
        """Prompt and output of a request; TensorRT-LLM keeps the rest for a step's drafts."""
        return self.max_seq_len - self.max_draft_len

    @property
    def padded_vocab(self) -> int:
        """Columns of the engine's logits: the vocabulary in equal parts for all ranks."""
        return -(-self.vocab_size // self.tensor_parallel) * self.tensor_parallel

    @classmethod
    def load(cls, directory: Path) -> TargetEngine:
        """Reads and checks config.json.

        Raises EngineFolderError naming what is missing or wrong, and the flag of trtllm-build.
        """
        if not is_target_engine(directory):
            raise EngineFolderError(
                f"{directory} is no TensorRT-LLM engine: its {CONFIG} has no pretrained_config "
                "and build_config; make one with trtllm-build"
            )
        data = json.loads((directory / CONFIG).read_text())
        build, model = data["build_config"], data["pretrained_config"]
        _check_build(directory, build)
        mapping = model.get("mapping", {})
        try:
            engine = cls(
                vocab_size=model["vocab_size"],
                max_seq_len=build["max_seq_len"],
                max_draft_len=build["max_draft_len"],
                logits_dtype=model.get("logits_dtype", "float32"),
                tensor_parallel=mapping.get("tp_size", 1),
                ranks=mapping.get("world_size", 1),
            )
        except KeyError as error:
            raise EngineFolderError(f"{directory / CONFIG} lacks {error}; build it again") from None
        engine._check_files(directory)
        return engine

    def _check_files(self, directory: Path) -> None:
        for rank in range(self.ranks):
            if not (directory / f"rank{rank}.engine").is_file():
                raise EngineFolderError(
                    f"{directory} lacks rank{rank}.engine of {self.ranks} ranks; build it again "
                    "from a checkpoint of as many ranks"
                )


def is_target_engine(directory: Path) -> bool:
    """Whether a folder's config.json is one of trtllm-build."""
    try:
        data = json.loads((directory / CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and {"build_config", "pretrained_config"} <= data.keys()


def _check_build(directory: Path, build: dict[str, Any]) -> None:
    """Refuses an engine that cannot verify external drafts or reuse prefixes."""
    mode, plugins = build.get("speculative_decoding_mode"), build.get("plugin_config", {})
    kv_cache = str(build.get("kv_cache_type")).lower()
    for name, value, good, flag in (
        (
            "speculative_decoding_mode",
            mode,
            (mode.lower() if isinstance(mode, str) else mode) in EXTERNAL,
            "--speculative_decoding_mode draft_tokens_external",
        ),
        (
            "max_draft_len",
            build.get("max_draft_len"),
            (build.get("max_draft_len") or 0) > 0,
            "--max_draft_len 16",
        ),
        ("kv_cache_type", kv_cache, kv_cache.endswith("paged"), "--kv_cache_type paged"),
        (
            "use_paged_context_fmha",
            plugins.get("use_paged_context_fmha"),
            plugins.get("use_paged_context_fmha") is True,
            "--use_paged_context_fmha enable",
        ),
    ):
        if not good:
            raise EngineFolderError(
                f"{directory / CONFIG} states {name} {value!r}; build the engine again with "
                f"`trtllm-build {flag}`"
            )
