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
LOGITS_DTYPE = "float32"  # float16 cannot hold the sums over a large vocabulary
AWQ_VOCAB_MULTIPLE = 64  # ModelOpt pads the vocabulary of an AWQ model to a multiple of this


def padded_vocab(vocab: int, multiple: int) -> int:
    """The width of an engine's logits: the vocabulary padded to a multiple (of TP; AWQ: 64).

    Raises ValueError for sizes below 1.
    """
    if vocab < 1 or multiple < 1:
        raise ValueError(f"vocab is {vocab}, multiple is {multiple}; both must be 1 or more")
    return -(-vocab // multiple) * multiple


@dataclass(frozen=True)
class EngineConfig:
    """What the config.json of an engine folder states, fit or not; absent values are None, empty
    or TensorRT-LLM's defaults."""

    version: str | None
    model: dict[str, Any]
    build: dict[str, Any]

    @classmethod
    def load(cls, directory: Path) -> EngineConfig:
        """Raises EngineFolderError where there is no config.json of trtllm-build."""
        path = directory / CONFIG
        problem = f"it has no {CONFIG}"
        if path.is_file():
            problem = f"its {CONFIG} has no pretrained_config and build_config"
            try:
                data = json.loads(path.read_text())
                model, build = data["pretrained_config"], data["build_config"]
                if isinstance(model, dict) and isinstance(build, dict):
                    return cls(data.get("version"), model, build)
            except (ValueError, KeyError, TypeError):
                pass
        raise EngineFolderError(
            f"{directory} is no TensorRT-LLM engine: {problem}; make one with trtllm-build"
        )

    def number(self, name: str) -> int:
        """A number of the build; 0 where it is absent."""
        return int(self.build.get(name) or 0)

    def plugin(self, name: str) -> Any:
        """A setting of the plugin section; older files write it with an underscore in front."""
        section = self.build.get("plugin_config") or {}
        return section.get(name, section.get(f"_{name}"))

    @property
    def mode(self) -> Any:
        """speculative_decoding_mode, a number or a name in lower case."""
        mode = self.build.get("speculative_decoding_mode")
        return mode.lower() if isinstance(mode, str) else mode

    @property
    def verifies_drafts(self) -> bool:
        """Whether the engine was built to verify draft tokens from outside."""
        return self.mode in EXTERNAL

    @property
    def kv_cache_type(self) -> str:
        """Name of the kind of KV cache, in upper case."""
        return str(self.build.get("kv_cache_type")).rpartition(".")[2].upper()

    @property
    def paged_cache(self) -> bool:
        """Whether keys and values lie in blocks."""
        return self.kv_cache_type == "PAGED"

    @property
    def paged_context(self) -> bool:
        """Whether prompts attend to reused blocks (use_paged_context_fmha)."""
        return self.plugin("use_paged_context_fmha") in (True, "enable")

    @property
    def logits_dtype(self) -> str:
        """The type of the logits, which is that of draft logits too."""
        return self.model.get("logits_dtype", LOGITS_DTYPE)

    @property
    def tensor_parallel(self) -> int:
        """Parts of every tensor."""
        return self._mapping.get("tp_size", 1)

    @property
    def pipeline_parallel(self) -> int:
        """Parts of the layers."""
        return self._mapping.get("pp_size", 1)

    @property
    def ranks(self) -> int:
        """Processes of the engine."""
        return self._mapping.get("world_size", self.tensor_parallel * self.pipeline_parallel)

    @property
    def _mapping(self) -> dict[str, Any]:
        return self.model.get("mapping") or {}

    def missing_ranks(self, directory: Path) -> list[int]:
        """Ranks whose engine is not in the folder."""
        files = (directory / f"rank{rank}.engine" for rank in range(self.ranks))
        return [rank for rank, file in enumerate(files) if not file.is_file()]


@dataclass(frozen=True)
class TargetEngine:
    """What a built target allows. Lengths in tokens; tensor_parallel of `ranks` processes."""

    vocab_size: int
    max_seq_len: int
    max_draft_len: int
    tensor_parallel: int = 1
    ranks: int = 1

    @property
    def max_length(self) -> int:
        """Prompt and output of a request; TensorRT-LLM keeps the rest for a step's drafts, even
        in a call without any."""
        return self.max_seq_len - self.max_draft_len

    @classmethod
    def load(cls, directory: Path) -> TargetEngine:
        """Reads and checks config.json.

        Raises EngineFolderError naming what is missing or wrong, and the flag of trtllm-build.
        """
        config = EngineConfig.load(directory)
        _check_build(directory, config)
        try:
            engine = cls(
                vocab_size=config.model["vocab_size"],
                max_seq_len=config.build["max_seq_len"],
                max_draft_len=config.build["max_draft_len"],
                tensor_parallel=config.tensor_parallel,
                ranks=config.ranks,
            )
        except KeyError as error:
            raise EngineFolderError(f"{directory / CONFIG} lacks {error}; build it again") from None
        for rank in config.missing_ranks(directory):
            raise EngineFolderError(
                f"{directory} lacks rank{rank}.engine of {engine.ranks} ranks; build it again from "
                "a checkpoint of as many ranks"
            )
        return engine

    def check_use(self, max_length: int, max_draft_tokens: int) -> None:
        """Refuses longer sequences (prompt + output) or drafts than the engine was built for.

        Raises EngineFolderError naming field, limit and remedy.
        """
        for name, value, limit, flag in (
            ("max_draft_tokens", max_draft_tokens, self.max_draft_len, "max_draft_len"),
            ("max_length", max_length, self.max_length, "max_seq_len"),
        ):
            if value > limit:
                raise EngineFolderError(
                    f"{name} is {value}; the target engine of max_seq_len {self.max_seq_len} and "
                    f"max_draft_len {self.max_draft_len} allows up to {limit}: lower it, or build "
                    f"the engine again with a larger --{flag}"
                )


def is_target_engine(directory: Path) -> bool:
    """Whether a folder's config.json is one of trtllm-build."""
    try:
        EngineConfig.load(directory)
    except (OSError, EngineFolderError):
        return False
    return True


def _check_build(directory: Path, config: EngineConfig) -> None:
    """Refuses an engine that cannot verify external drafts or reuse prefixes."""
    most, paged = config.number("max_draft_len"), config.plugin("use_paged_context_fmha")
    for name, value, good, flag in (
        (
            "speculative_decoding_mode",
            config.mode,
            config.verifies_drafts,
            "--speculative_decoding_mode draft_tokens_external",
        ),
        ("max_draft_len", most, most > 0, "--max_draft_len 16"),
        ("kv_cache_type", config.kv_cache_type, config.paged_cache, "--kv_cache_type paged"),
        (
            "use_paged_context_fmha",
            paged,
            config.paged_context,
            "--use_paged_context_fmha enable",
        ),
        (
            "logits_dtype",
            config.logits_dtype,
            config.logits_dtype == LOGITS_DTYPE,
            f"--logits_dtype {LOGITS_DTYPE}",
        ),
    ):
        if not good:
            raise EngineFolderError(
                f"{directory / CONFIG} states {name} {value!r}; build the engine again with "
                f"`trtllm-build {flag}`"
            )
