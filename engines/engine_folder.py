"""The folder of a compiled draft: what it is, and that it fits what it is used with.

config.json       format, architecture, sizes, fingerprints, builder; checked on opening
rank0.engine      the serialized engine, weights and kernels included
provenance.json   where it came from
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..plugins.slot_attention.rule import MemoryRule
from .config import DecoderConfig, RopeConfig
from .draft_io import DraftIO

FORMAT = "masw-draft-engine-1"
CONFIG, ENGINE = "config.json", "rank0.engine"


class EngineFolderError(ValueError):
    """An engine folder that cannot be used; the message names what differs and the remedy."""


@dataclass(frozen=True)
class Builder:
    """What made an engine. module: "tensorrt" or "tensorrt_rtx"; attention: "plugin" or "native".

    compute_capability: of the GPU it was built for, as "9.0"; None where the builder had none.
    """

    module: str
    version: str
    attention: str
    compute_capability: str | None = None


@dataclass(frozen=True)
class DraftEngine:
    """Everything config.json states. draft_tokens: the largest γ; base, adaptor: fingerprints.

    tokenizer: fingerprint of the tokens (tokens.py), so that a pair with others is refused.
    quantization: of the backbone's linear layers, "none" where an older folder does not say.
    """

    model: DecoderConfig
    io: DraftIO
    draft_tokens: int
    builder: Builder
    base: str
    adaptor: str | None = None
    tokenizer: str | None = None
    quantization: str = "none"

    def __post_init__(self):
        limit = self.io.rule.rollback
        if self.io.rule.ring and not 1 <= self.draft_tokens <= limit:
            raise EngineFolderError(
                f"draft_tokens is {self.draft_tokens}; the rollback window R = {limit} allows 1 to "
                f"{limit}: lower draft_tokens or build with a larger rollback"
            )

    def write(self, directory: Path) -> None:
        """Writes config.json into a folder that is being made."""
        text = json.dumps({"format": FORMAT} | asdict(self), indent=2)
        (directory / CONFIG).write_text(text + "\n")

    @classmethod
    def load(cls, directory: Path) -> DraftEngine:
        """Reads config.json. Raises EngineFolderError for what is missing, unknown or damaged."""
        path = directory / CONFIG
        if not path.is_file() or not (directory / ENGINE).is_file():
            raise EngineFolderError(
                f"{directory} is no draft engine: it lacks {CONFIG} or {ENGINE}; "
                "make one with `masw-build draft`"
            )
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise EngineFolderError(f"{path} is no JSON: {error}") from None
        if data.pop("format", None) != FORMAT:
            raise EngineFolderError(f"{path} is not of format {FORMAT}; build the engine again")
        try:
            return cls(**data | _nested(data))
        except (KeyError, TypeError) as error:
            raise EngineFolderError(f"{path} does not fit this version: {error}") from None

    def check_use(
        self,
        base: str | None = None,
        tokenizer: str | None = None,
        version: str | None = None,
        compute_capability: str | None = None,
    ) -> None:
        """Refuses another base model, tokenizer, version of TensorRT, or kind of GPU.

        None is not compared; a builder without a GPU made an engine for any kind.
        """
        if self.builder.compute_capability is None:
            compute_capability = None
        for name, wanted, found in (
            ("base model", base, self.base),
            ("tokenizer", tokenizer, self.tokenizer),
            (f"{self.builder.module} version", version, self.builder.version),
            ("compute capability", compute_capability, self.builder.compute_capability),
        ):
            if wanted is not None and wanted != found:
                raise EngineFolderError(
                    f"the engine was built for {name} {str(found)[:16]}, not {wanted[:16]}; "
                    "build it again with `masw-build draft`"
                )


def is_engine_folder(directory: Path) -> bool:
    """Whether a folder's config.json is that of a draft engine, of whichever version."""
    try:
        data = json.loads((directory / CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and str(data.get("format")).startswith("masw-draft-engine-")


def file_sha256(path: Path | None) -> str | None:
    """Hex digest of a file; None without one."""
    if path is None or not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _nested(data: dict[str, Any]) -> dict[str, Any]:
    """The dataclasses inside config.json; raises TypeError for unknown or missing fields."""
    model = dict(data["model"])
    model["rope"], model["eos_ids"] = RopeConfig(**model["rope"]), tuple(model["eos_ids"])
    io = dict(data["io"])
    io["rule"] = MemoryRule(**io["rule"])
    _require(DraftIO, io)
    return {
        "model": DecoderConfig(**model),
        "io": DraftIO(**io),
        "builder": Builder(**data["builder"]),
    }


def _require(kind: type, values: dict[str, Any]) -> None:
    missing = {field.name for field in fields(kind)} - values.keys()
    if missing:
        raise TypeError(f"{kind.__name__} lacks {', '.join(sorted(missing))}")
