"""The memory adaptor: mirrored key and value projections for slot tokens, and its file.

A slot token runs through the frozen backbone; only its keys and values come from projections of
their own, one pair per layer, with the biases of the backbone's (MASW, arXiv 2608.30252, 4.1).
The file is safetensors with a JSON header; loading is strict and checks the base model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..plugins.slot_attention.rule import MemoryRule, SlotVisibility
from .config import DecoderConfig
from .linear import Linear
from .whole_file import whole_file

FORMAT = "masw-adaptor-1"
LAST_TOKEN = "last_token"


class AdaptorError(ValueError):
    """An adaptor file that does not fit; the message names what differs."""


@dataclass(frozen=True)
class AdaptorConfig:
    """Header of an adaptor file.

    slot_embedding: "last_token" (the embedding of the raw token before the boundary) or a fixed
    token id. offset: whether a trained vector is added to it. low_rank: rank of the updates of the
    slots' queries and outputs (0: none; an experiment). base: fingerprint of the backbone.
    """

    base: str
    sink: int = 128
    window: int = 128
    interval: int = 8
    visibility: SlotVisibility = SlotVisibility.EVICTED
    slot_embedding: str | int = LAST_TOKEN
    offset: bool = False
    low_rank: int = 0
    trained: bool = False

    def __post_init__(self):
        for name, least in (("sink", 0), ("window", 1), ("interval", 1), ("low_rank", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise AdaptorError(f"{name} is {value!r}; it must be an integer from {least} up")
        if self.visibility not in list(SlotVisibility):
            raise AdaptorError(
                f"visibility is {self.visibility!r}; use one of {', '.join(SlotVisibility)}"
            )
        object.__setattr__(self, "visibility", SlotVisibility(self.visibility))
        fixed = type(self.slot_embedding) is int and self.slot_embedding >= 0
        if self.slot_embedding != LAST_TOKEN and not fixed:
            raise AdaptorError(
                f"slot_embedding is {self.slot_embedding!r}; give {LAST_TOKEN!r} or a token id"
            )

    def rule(self, rollback: int = 16) -> MemoryRule:
        """The memory rule the adaptor was made for."""
        return MemoryRule(self.sink, self.window, rollback, self.interval, self.visibility)


class LowRank(nn.Sequential):
    """A low-rank update, zero until trained."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__(Linear(inputs, rank, bias=False), Linear(rank, outputs, bias=False))
        nn.init.zeros_(self[1].weight)


class KeyValueMirror(nn.Module):
    """The slot tokens' own key and value projections of one layer.

    With `rank` also low-rank updates of their queries and of the output projection.
    """

    def __init__(self, config: DecoderConfig, rank: int = 0):
        super().__init__()
        width, q_width = config.kv_heads * config.head_dim, config.heads * config.head_dim
        self.query = LowRank(config.hidden_size, q_width, rank) if rank else None
        self.output = LowRank(q_width, config.hidden_size, rank) if rank else None
        self.k_proj = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, width, bias=config.qkv_bias)


class Adaptor(nn.Module):
    """All mirrored projections, and the offset added to slot embeddings where there is one."""

    def __init__(self, config: AdaptorConfig, decoder: DecoderConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            KeyValueMirror(decoder, config.low_rank) for _ in range(decoder.layers)
        )
        self.offset = nn.Parameter(torch.zeros(decoder.hidden_size)) if config.offset else None

    def embed(self, raw_ids: Tensor, embedding: nn.Embedding) -> Tensor:
        """Input embeddings (..., hidden) of the slots that follow raw tokens `raw_ids` (...)."""
        fixed = self.config.slot_embedding
        ids = raw_ids if fixed == LAST_TOKEN else torch.full_like(raw_ids, fixed)
        embedded = embedding(ids)
        return embedded if self.offset is None else embedded + self.offset.to(embedded.dtype)

    def is_finite(self) -> bool:
        """Whether no weight is infinite or NaN."""
        return all(parameter.isfinite().all() for parameter in self.parameters())

    def save(self, path: Path, dtype: torch.dtype | None = None, **changes) -> None:
        """Writes the adaptor atomically; the tensors come back bit for bit.

        dtype: precision of the file (None: as it is). changes: header fields that differ there.
        """
        entries = {"format": FORMAT} | asdict(replace(self.config, **changes))
        # One key: safetensors writes several in no fixed order.
        header = {"masw": json.dumps(entries, sort_keys=True)}
        tensors = {
            name: tensor.detach().to(device="cpu", dtype=dtype).contiguous()
            for name, tensor in self.state_dict().items()
        }
        with whole_file(path) as part:
            save_file(tensors, part, metadata=header)

    @classmethod
    def load(cls, path: Path, decoder: DecoderConfig, base: str) -> Adaptor:
        """Reads an adaptor for the backbone with fingerprint `base`.

        Raises AdaptorError for another format, another base model, or any tensor that is missing,
        unexpected or of another shape.
        """
        config, tensors = read_adaptor(path)
        if config.base != base:
            raise AdaptorError(
                f"{path.name} was made for base model {config.base[:12]}, not {base[:12]}; "
                "use the adaptor of this draft model"
            )
        adaptor = cls(config, decoder)
        adaptor.check_fit(path.name, decoder, {name: t.shape for name, t in tensors.items()})
        adaptor.load_state_dict(tensors, assign=True)
        return adaptor

    def check_fit(
        self, name: str, decoder: DecoderConfig, shapes: Mapping[str, Sequence[int]]
    ) -> None:
        """Refuses a file `name` whose header or whose tensors are not those of this model."""
        fixed = self.config.slot_embedding
        if fixed != LAST_TOKEN and fixed >= decoder.vocab_size:
            raise AdaptorError(
                f"{name}: slot_embedding is {fixed}; the model has {decoder.vocab_size} token ids"
            )
        wanted = {key: tuple(tensor.shape) for key, tensor in self.state_dict().items()}
        for key in sorted(wanted.keys() | shapes.keys()):
            if key not in shapes:
                raise AdaptorError(f"{name} lacks tensor {key}")
            if key not in wanted:
                raise AdaptorError(f"{name} has unexpected tensor {key}")
            if tuple(shapes[key]) != wanted[key]:
                raise AdaptorError(
                    f"{name}: {key} is {tuple(shapes[key])}, the model needs {wanted[key]}"
                )


def check_adaptor(path: Path, decoder: DecoderConfig) -> AdaptorConfig:
    """The header of a file that fits an architecture; its weights are not read.

    Raises AdaptorError as `Adaptor.load` does, the base model's fingerprint left out.
    """
    config = read_header(path)
    with _opened(path) as file:
        names = list(file.keys())
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    with torch.device("meta"):
        Adaptor(config, decoder).check_fit(path.name, decoder, shapes)
    return config


def read_adaptor(path: Path) -> tuple[AdaptorConfig, dict[str, Tensor]]:
    """Header and tensors of an adaptor file, not yet checked against a model."""
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return read_header(path), tensors


def read_header(path: Path) -> AdaptorConfig:
    """The header of an adaptor file alone."""
    with _opened(path) as file:
        header = file.metadata() or {}
    return _read_header(path, header.get("masw", "{}"))


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:
        raise AdaptorError(f"{path} is not a safetensors file: {error}") from error


def _read_header(path: Path, text: str) -> AdaptorConfig:
    """The config of a header, in which every field must stand."""
    try:
        values = dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise AdaptorError(f"{path.name} has a header that is no JSON object: {error}") from error
    form = values.pop("format", None)
    if form != FORMAT:
        raise AdaptorError(f"{path.name} has format {form!r}; this version reads {FORMAT!r}")
    names = {entry.name for entry in fields(AdaptorConfig)}
    for problem, wrong in (("lacks", names - values.keys()), ("has", values.keys() - names)):
        if wrong:
            raise AdaptorError(f"{path.name}: its header {problem} {', '.join(sorted(wrong))}")
    try:
        return AdaptorConfig(**values)
    except AdaptorError as error:
        raise AdaptorError(f"{path.name}: {error}") from error
