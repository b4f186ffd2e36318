"""Where the files of a deployment lie: folders with fixed names below one root."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    """Where the files of a gpu recipe lie below its root."""

    root: Path

    @property
    def target_model(self) -> Path:
        """Hugging Face folder of the target."""
        return self.root / "models" / "target"

    @property
    def draft_model(self) -> Path:
        """Hugging Face folder of the draft."""
        return self.root / "models" / "draft"

    @property
    def adaptor(self) -> Path:
        """The draft's trained memory adaptor."""
        return self.root / "models" / "adaptor.safetensors"

    @property
    def checkpoint(self) -> Path:
        """TensorRT-LLM checkpoint of the target: config.json and rank*.safetensors."""
        return self.root / "checkpoints" / "target"

    @property
    def target_engine(self) -> Path:
        """TensorRT-LLM engine folder of the target: config.json and rank*.engine."""
        return self.root / "engines" / "target"

    @property
    def draft_engine(self) -> Path:
        """Engine folder of the draft (`masw-build draft`)."""
        return self.root / "engines" / "draft"

    @property
    def logs(self) -> Path:
        """Output of the slow steps, one file each."""
        return self.root / "logs"

    @property
    def pair(self) -> Path:
        """The pair folder that the Triton models load."""
        return self.root / "pair"

    @property
    def repository(self) -> Path:
        """The Triton model repository."""
        return self.root / "repository"
