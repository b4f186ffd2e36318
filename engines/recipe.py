"""A recipe: one short YAML from which a pair is built, checked, laid out and served.

A recipe names models by architecture and states numbers; `places.py` says where the files lie.
Errors name the field, its value and the limit.
"""

from __future__ import annotations

import importlib.resources
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..plugins.slot_attention.rule import MemoryRule, SlotVisibility
from . import architectures
from .config import DecoderConfig

MOST = 2**24  # of anything that is counted: more is a slip
Count = Annotated[int, Field(ge=1, le=MOST, strict=True)]
GpuIndex = Annotated[int, Field(ge=0, le=1023, strict=True)]
Port = Annotated[int, Field(ge=1, le=65_535, strict=True)]


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names file, field and limit."""


class Lane(StrEnum):
    """cpu: torch engines on a small model. gpu: TensorRT draft, TensorRT-LLM target."""

    CPU = "cpu"
    GPU = "gpu"


class Launch(StrEnum):
    """How the target's ranks start: leader (one server per rank under mpirun; may span nodes) or
    orchestrator (one server that spawns its ranks; one node)."""

    LEADER = "leader"
    ORCHESTRATOR = "orchestrator"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Package(_Part):
    """The embedded model: a Python package that carries its weights as one GGUF file."""

    package: str
    file: str
    directory: str


class TargetRecipe(_Part):
    """The target. gpus: device of each rank, PP x TP of them; kv_fraction: of free device memory.

    quantization: "none", or what ModelOpt applies before the checkpoint is written; kv_cache: dtype
    of cached keys and values, "auto" is the model's. max_draft_len: what the engine is built for.
    """

    architecture: str | None = None
    dtype: str = "bfloat16"
    quantization: str = "none"
    kv_cache: str = "auto"
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    gpus: tuple[GpuIndex, ...] = ()
    kv_fraction: Annotated[float, Field(gt=0, lt=1, strict=True)] = 0.9
    tokens_per_block: Count = 32
    max_draft_len: Count = 16
    max_num_tokens: Count = 8192

    @property
    def ranks(self) -> int:
        """Processes of the target, one per GPU."""
        return self.tensor_parallel * self.pipeline_parallel


class DraftRecipe(_Part):
    """The draft, one process on one GPU (gpu lane). quantization: "none", "int8" (cpu lane),
    "fp8" or "int4_awq" (gpu lane)."""

    architecture: str | None = None
    dtype: str = "bfloat16"
    quantization: str = "none"
    gpu: GpuIndex = 0


class Limits(_Part):
    """Lengths in tokens, sequences, and seconds; see `RepositoryConfig` and `LoopSettings`."""

    max_length: Count = 32_768
    max_sequences: Count = 8
    max_waiting: Annotated[int, Field(ge=0, le=MOST, strict=True)] = 64
    draft_tokens: Annotated[int, Field(ge=0, le=MOST, strict=True)] = 5
    max_draft_tokens: Count = 16
    chunk: Count = 512
    time_limit: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = 600.0


class Serving(_Part):
    """Server-wide choices. decoupled: stream (false: NVIDIA's unary clients)."""

    decoupled: bool = True
    launch: Launch = Launch.LEADER
    http_port: Port = 8000
    grpc_port: Port = 8001
    metrics_port: Port = 8002

    @model_validator(mode="after")
    def _different(self) -> Serving:
        ports = self.http_port, self.grpc_port, self.metrics_port
        if len(set(ports)) < len(ports):
            raise ValueError(f"http_port, grpc_port, metrics_port are {ports}; give three ports")
        return self


class Recipe(_Part):
    """Everything a deployment states. `package` is for the cpu lane only."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[a-z0-9][a-z0-9.\-]*$")]
    lane: Lane
    package: Package | None = None
    target: TargetRecipe = TargetRecipe()
    draft: DraftRecipe = DraftRecipe()
    memory: MemoryRule = MemoryRule()
    limits: Limits = Limits()
    serving: Serving = Serving()

    @field_validator("memory", mode="before")
    @classmethod
    def _memory(cls, value: Any) -> Any:
        """A mapping becomes a rule, whose own checks name the field."""
        if not isinstance(value, dict):
            return value
        known = set(MemoryRule.__dataclass_fields__)
        if unknown := set(value) - known:
            names = ", ".join(sorted(map(str, unknown)))
            raise ValueError(f"unknown {names}; known: {sorted(known)}")
        for name, number in value.items():
            if name != "visibility" and type(number) is not int:
                raise ValueError(f"{name} is {number!r}; it must be an integer of 0 or more")
            if name != "visibility" and number > MOST:
                raise ValueError(f"{name} is {number}; it must be {MOST} or less")
        if value.get("visibility", SlotVisibility.EVICTED) not in list(SlotVisibility):
            raise ValueError(
                f"visibility is {value['visibility']!r}; use one of {', '.join(SlotVisibility)}"
            )
        return MemoryRule(**value)

    @model_validator(mode="after")
    def _together(self) -> Recipe:
        limits, target = self.limits, self.target
        if limits.draft_tokens > limits.max_draft_tokens:
            raise ValueError(
                f"limits.draft_tokens is {limits.draft_tokens}; limits.max_draft_tokens is "
                f"{limits.max_draft_tokens}"
            )
        if limits.max_draft_tokens > self.memory.rollback:
            raise ValueError(
                f"limits.max_draft_tokens is {limits.max_draft_tokens}; the rollback window "
                f"memory.rollback is {self.memory.rollback}"
            )
        if self.lane == Lane.CPU:
            self._allow("target.dtype", target.dtype, CPU_DTYPES)
            self._allow("draft.dtype", self.draft.dtype, (target.dtype,))
            self._allow("target.quantization", target.quantization, CPU_TARGETS)
            self._allow("draft.quantization", self.draft.quantization, CPU_DRAFTS)
            return self
        self._check_gpu_lane()
        return self

    def _check_gpu_lane(self) -> None:
        limits, target = self.limits, self.target
        for name, part in (("target", target), ("draft", self.draft)):
            try:
                architectures.architecture(part.architecture)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from None
            self._allow(f"{name}.dtype", part.dtype, GPU_DTYPES)
        self._allow("target.quantization", target.quantization, GPU_TARGETS)
        self._allow("target.kv_cache", target.kv_cache, ("auto", "fp8"))
        self._allow("draft.quantization", self.draft.quantization, GPU_DRAFTS)
        if len(target.gpus) != target.ranks or len(set(target.gpus)) != target.ranks:
            raise ValueError(
                f"target.gpus is {list(target.gpus)}; tensor_parallel "
                f"{target.tensor_parallel} x pipeline_parallel {target.pipeline_parallel} needs "
                f"{target.ranks} different devices"
            )
        if limits.max_draft_tokens > target.max_draft_len:
            raise ValueError(
                f"limits.max_draft_tokens is {limits.max_draft_tokens}; the target engine is built "
                f"for target.max_draft_len {target.max_draft_len}"
            )
        block = target.tokens_per_block
        if block & (block - 1):
            raise ValueError(f"target.tokens_per_block is {block}; use a power of two")
        if self.package is not None:
            raise ValueError("package is given; only the cpu lane has one")

    def _allow(self, name: str, value: str, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            raise ValueError(
                f"{name} is {value!r}; lane {self.lane} has one of {', '.join(allowed)}"
            )

    @property
    def shares_gpu(self) -> bool:
        """Whether draft and target have a GPU in common."""
        return self.draft.gpu in self.target.gpus

    def target_config(self) -> DecoderConfig:
        """The target's architecture (gpu lane)."""
        return architectures.architecture(self.target.architecture)

    def draft_config(self) -> DecoderConfig:
        """The draft's architecture (gpu lane)."""
        return architectures.architecture(self.draft.architecture)


CPU_DTYPES, GPU_DTYPES = ("float32", "bfloat16"), ("bfloat16", "float16")
CPU_TARGETS, GPU_TARGETS = ("none",), ("none", "fp8", "int4_awq", "nvfp4")
CPU_DRAFTS, GPU_DRAFTS = ("none", "int8"), ("none", "fp8", "int4_awq")


def recipe_folder() -> Path:
    """Folder of the shipped recipes."""
    return Path(str(importlib.resources.files(f"{__package__}.recipes")))


def recipe_names() -> tuple[str, ...]:
    """Names of the shipped recipes."""
    files = recipe_folder().glob("*.yaml")
    return tuple(sorted(path.stem for path in files if path.name != architectures.FILE))


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by name, or one from a YAML file.

    Raises RecipeError naming the file and every field that is wrong.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else recipe_folder() / f"{name}.yaml"
    if not path.is_file() or path.name == architectures.FILE:
        raise RecipeError(
            f"recipe {name!r} does not exist; give a YAML file or one of "
            f"{', '.join(recipe_names())}"
        )
    try:
        data = yaml.load(path.read_text(), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path.name} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path.name} is empty or no mapping; see the shipped recipes")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{path.name}: {_explain(error)}") from None


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that gives a key twice; YAML's own loader takes the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node, seen = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused later: it is no field
            if key.value in seen:
                problem = f"key {key.value!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def _explain(error: ValidationError) -> str:
    """Every complaint on one line: the field with dots, its value, what is allowed."""
    lines = []
    for each in error.errors():
        field = ".".join(map(str, each["loc"]))
        text = each["msg"].removeprefix("Value error, ")
        value = "" if each["type"] in ("value_error", "missing") else f" is {each['input']!r}"
        lines.append(f"{field}{value}: {text}" if field else text)
    return "; ".join(lines)
