"""A prepared pair of target and draft: one folder from which every engine loads.

pair.json             format, dtype, quantisation of the draft, memory rule and limits
target/  draft/       Hugging Face folders (links; the same one for a model drafting itself);
                      draft/ may be a compiled draft (engine_folder.py) instead, and target/ a
                      TensorRT-LLM engine (trtllm_folder.py) with the generation_config.json
adaptor.safetensors   the draft's memory adaptor
provenance.json       where all of it came from
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import torch

from ..plugins.slot_attention.rule import MemoryRule
from .adaptor import Adaptor, read_header
from .config import end_ids
from .decoder import Decoder
from .draft import TorchDraft
from .engine_folder import DraftEngine, file_sha256, is_engine_folder
from .executor import TensorRTExecutor
from .int8 import to_int8
from .recipe import CPU_DRAFTS, GPU_DRAFTS, Recipe
from .speculative import LoopSettings
from .target import TorchTarget
from .tensorrt_draft import TensorRTDraft
from .tokens import TOKENIZER, tokens_sha256
from .trtllm_folder import TargetEngine, is_target_engine
from .trtllm_target import ExecutorSettings, TrtllmTarget
from .whole_file import whole_file

FORMAT = "masw-pair-1"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = tuple(dict.fromkeys(CPU_DRAFTS + GPU_DRAFTS))  # of the draft, in both lanes


class DraftMode(StrEnum):
    """Memory of the draft: slots (MASW), full KV, sink + window; or no draft at all."""

    SLOTS = "slots"
    FULL = "full"
    WINDOW = "window"
    NONE = "none"


class PairError(ValueError):
    """A pair folder that cannot be served; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class Pair:
    """What target and draft have in common. Lengths in tokens; memory as in `MemoryRule`.

    draft_quantization: "none", "int8" (torch draft) or that of the compiled draft.
    """

    dtype: str = "float32"
    memory: MemoryRule = field(default_factory=MemoryRule)
    max_length: int = 8192
    max_draft_tokens: int = 16
    draft_tokens: int = 5
    chunk: int = 512
    draft_quantization: str = "none"

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise PairError(f"dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}")
        if self.draft_quantization not in QUANTIZATIONS:
            raise PairError(
                f"draft_quantization is {self.draft_quantization!r}; use one of "
                f"{', '.join(QUANTIZATIONS)}"
            )
        if self.max_draft_tokens > self.memory.rollback:
            raise PairError(
                f"max_draft_tokens is {self.max_draft_tokens}; the rollback window allows "
                f"{self.memory.rollback}"
            )

    @classmethod
    def of(cls, recipe: Recipe) -> Pair:
        """The pair that a recipe states."""
        limits = recipe.limits
        return cls(
            dtype=recipe.target.dtype,
            memory=recipe.memory,
            max_length=limits.max_length,
            max_draft_tokens=limits.max_draft_tokens,
            draft_tokens=limits.draft_tokens,
            chunk=limits.chunk,
            draft_quantization=recipe.draft.quantization,
        )

    def rule(self, mode: DraftMode, window: int | None = None) -> MemoryRule | None:
        """The draft's memory rule in a mode; `window` widens the window of mode `window`."""
        match DraftMode(mode):
            case DraftMode.SLOTS:
                return self.memory
            case DraftMode.FULL:
                return MemoryRule.full(self.max_length)
            case DraftMode.WINDOW:
                return replace(self.memory, window=window or self.memory.window, interval=0)
        return None

    def loop_settings(self, mode: DraftMode, **changes) -> LoopSettings:
        """Settings of the speculative loop for this pair in a draft mode."""
        settings = LoopSettings(
            max_length=self.max_length,
            max_draft_tokens=self.max_draft_tokens,
            draft_tokens=self.draft_tokens,
            draft_chunk=self.chunk,
            target_chunk=self.chunk,
            rule=self.rule(mode),
        )
        return replace(settings, **changes)

    def save(self, directory: Path) -> None:
        """Writes pair.json atomically."""
        text = json.dumps({"format": FORMAT} | asdict(self), indent=2)
        with whole_file(directory / "pair.json") as part:
            part.write_text(text + "\n")

    @classmethod
    def load(cls, directory: Path) -> Pair:
        """Reads pair.json. Raises PairError naming what is missing or unknown."""
        path = directory / "pair.json"
        if not path.is_file():
            raise PairError(f"{directory} is no prepared pair: it has no pair.json")
        data = json.loads(path.read_text())
        if data.pop("format", None) != FORMAT:
            raise PairError(f"{path} is not of format {FORMAT}; prepare the pair again")
        try:
            return cls(**data | {"memory": MemoryRule(**data["memory"])})
        except (KeyError, TypeError) as error:
            raise PairError(f"{path} does not fit this version: {error}") from error


def load_target(
    directory: Path,
    max_sequences: int = 8,
    engine: Path | None = None,
    settings: ExecutorSettings | None = None,
) -> TorchTarget | TrtllmTarget:
    """The pair's target engine with `max_sequences` full KV caches.

    It is TensorRT-LLM's where `engine`, or else target/, is a folder of trtllm-build; that states
    its own number of sequences, and runs as `settings` say. Raises PairError and EngineFolderError
    naming field, limit and remedy.
    """
    pair, folder = Pair.load(directory), engine or directory / "target"
    if engine or is_target_engine(folder):
        return _load_trtllm_target(directory, pair, folder, settings or ExecutorSettings())
    return TorchTarget(
        Decoder.load(folder, DTYPES[pair.dtype]),
        max_sequences=max_sequences,
        max_length=pair.max_length,
        max_draft_tokens=pair.max_draft_tokens,
        chunk=pair.chunk,
    )


def _load_trtllm_target(
    directory: Path, pair: Pair, folder: Path, settings: ExecutorSettings
) -> TrtllmTarget:
    """A built target that allows what the pair does; end ids are those of target/."""
    target = directory / "target"
    generation = target / "generation_config.json"
    if is_target_engine(target) and not generation.is_file():
        raise PairError(f"{target} has no generation_config.json; copy the model's into it")
    TargetEngine.load(folder).check_use(pair.max_length, pair.max_draft_tokens)
    return TrtllmTarget(folder, end_ids(target), settings)


def load_draft(
    directory: Path,
    mode: DraftMode = DraftMode.SLOTS,
    max_sequences: int = 8,
    window: int | None = None,
    device: torch.device | str = "cpu",
) -> TorchDraft | TensorRTDraft:
    """The pair's draft engine in a mode other than `none`: compiled if draft/ holds an engine.

    device: of a draft in torch; a compiled one runs on the current CUDA device.
    """
    pair = Pair.load(directory)
    rule = pair.rule(mode, window)
    if rule is None:
        raise PairError("draft mode 'none' has no draft engine")
    if is_engine_folder(directory / "draft"):
        engine = load_engine(directory, rule, max_sequences)
        executor = TensorRTExecutor(directory / "draft", engine)
        limits = {"max_length": pair.max_length, "max_draft_tokens": pair.max_draft_tokens}
        return TensorRTDraft(engine, executor, **limits)
    decoder = Decoder.load(directory / "draft", DTYPES[pair.dtype], device)
    adaptor = load_adaptor(directory, decoder, rule) if rule.interval else None
    return TorchDraft(
        quantize(decoder, pair.draft_quantization),
        rule,
        adaptor,
        max_sequences=max_sequences,
        max_length=pair.max_length,
        max_draft_tokens=pair.max_draft_tokens,
        chunk=pair.chunk,
    )


def quantize(decoder: Decoder, quantization: str) -> Decoder:
    """A torch draft's decoder as the pair wants it, changed in place.

    Raises PairError for what only a compiled draft has, and for int8 on a GPU.
    """
    if quantization not in CPU_DRAFTS:
        raise PairError(
            f"draft_quantization is {quantization!r}; a torch draft has one of "
            f"{', '.join(CPU_DRAFTS)}: compile it with `masw-build draft --quantization "
            f"{quantization}`"
        )
    if quantization == "none":
        return decoder
    if decoder.embed_tokens.weight.device.type != "cpu":
        raise PairError("draft_quantization is 'int8', which runs on the CPU only: use 'none'")
    return to_int8(decoder)


def load_adaptor(directory: Path, decoder: Decoder, rule: MemoryRule) -> Adaptor:
    """The pair's adaptor in the decoder's dtype. Raises PairError if it is for another memory."""
    adaptor = Adaptor.load(directory / "adaptor.safetensors", decoder.config, decoder.fingerprint())
    made_for = adaptor.config.rule(rule.rollback)
    if made_for != rule:
        raise PairError(f"the adaptor was made for {made_for}, the pair states {rule}")
    return adaptor.to(decoder.embed_tokens.weight).requires_grad_(False)


def load_engine(directory: Path, rule: MemoryRule, max_sequences: int) -> DraftEngine:
    """What the pair's compiled draft states, checked against the pair and the use of it.

    Raises PairError or EngineFolderError naming field, limit and remedy.
    """
    pair, engine = Pair.load(directory), DraftEngine.load(directory / "draft")
    adaptor = directory / "adaptor.safetensors"
    engine.check_use(
        base=read_header(adaptor).base if adaptor.is_file() else None,
        tokenizer=tokens_sha256(directory / "target" / TOKENIZER),
    )
    if rule.interval and engine.adaptor != file_sha256(adaptor):
        raise PairError(
            f"the engine was built with another adaptor than {adaptor}; build it again with "
            "`masw-build draft --adaptor`"
        )
    if engine.quantization != pair.draft_quantization:
        raise PairError(
            f"draft_quantization is {pair.draft_quantization!r}; the engine was built with "
            f"{engine.quantization!r}: build it again with `masw-build draft --quantization "
            f"{pair.draft_quantization}`"
        )
    if engine.io.rule != rule:
        raise PairError(
            f"the engine was built for {engine.io.rule}; this pair and draft mode need {rule}"
        )
    for name, value, limit in (
        ("max_length", pair.max_length, engine.io.max_length),
        ("max_draft_tokens", pair.max_draft_tokens, engine.draft_tokens),
        ("max_sequences", max_sequences, engine.io.max_sequences),
    ):
        if value > limit:
            raise PairError(
                f"{name} is {value}; the engine allows up to {limit}: lower it, or build the "
                "engine for more with `masw-build draft`"
            )
    return engine
