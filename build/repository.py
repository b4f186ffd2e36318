"""The Triton model repository: one typed object -> every config.pbtxt.

`RepositoryConfig` says what differs between deployments; `model_configs` turns it into protobuf
messages, so nothing can be left unfilled or quoted wrongly; `write_repository` lays them out.
Every model gets the whole configuration back as the JSON of its parameter `masw`.
"""

import importlib.resources
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from ..engines.places import Places
from ..engines.recipe import Lane, Recipe
from ..engines.whole_file import whole_file
from . import tensors
from .tensors import TensorSpec
from .trtllm_config import BackendTarget

LOOP, DRAFT, TARGET = "tensorrt_llm_bls", "masw_draft", "tensorrt_llm"
PREPROCESSING, POSTPROCESSING, ENSEMBLE = "preprocessing", "postprocessing", "ensemble"
LOAD_ORDER = (TARGET, DRAFT, PREPROCESSING, POSTPROCESSING, LOOP, ENSEMBLE)
DRAFT_MODES = ("slots", "full", "window", "none")
TARGET_MODES = ("torch", "hostile")
PARAMETER = "masw"


@dataclass(frozen=True)
class RepositoryConfig:
    """What one deployment of the six models needs to know.

    recipe: path of the recipe or prepared pair that draft, target and tokenizing models load.
    draft_tokens: draft length when a request names none (0 = plain decoding).
    draft_mode: memory of the draft, one of `DRAFT_MODES`.
    target_mode: "hostile" is for tests: the torch target with the C++ backend's worst manners.
    max_sequences: sequences decoded at once, and the largest batch of draft and target.
    max_waiting: further requests that may wait; beyond them requests are refused.
    decoupled: True streams; False (for NVIDIA's unary clients) answers each request exactly once.
    time_limit: seconds a request may take when it names no limit of its own.
    engine_threads: compute threads of draft and target each (0 = all cores).
    draft_gpu: device of the draft's process; None runs it on the CPU (cpu lane).
    target: the engine that TensorRT-LLM's backend serves; None is the torch target (cpu lane).
    """

    recipe: str
    draft_tokens: int = 5
    draft_mode: str = "slots"
    target_mode: str = "torch"
    max_sequences: int = 8
    max_waiting: int = 64
    decoupled: bool = True
    time_limit: float = 600.0
    engine_threads: int = 0
    draft_gpu: int | None = None
    target: BackendTarget | None = None

    def __post_init__(self):
        if not isinstance(self.recipe, str) or not self.recipe.strip():
            raise ValueError(f"recipe = {self.recipe!r}: give the path of a recipe or a pair")
        if self.draft_mode not in DRAFT_MODES:
            raise ValueError(f"draft_mode = {self.draft_mode!r}: use one of {DRAFT_MODES}")
        if self.target_mode not in TARGET_MODES:
            raise ValueError(f"target_mode = {self.target_mode!r}: use one of {TARGET_MODES}")
        if not isinstance(self.decoupled, bool):
            raise ValueError(f"decoupled = {self.decoupled!r}: use true or false")
        for name, least in _LEAST.items():
            _check_integer(name, getattr(self, name), least)
        if not 0 < self.time_limit < float("inf"):
            raise ValueError(f"time_limit = {self.time_limit}: use a number of seconds above 0")
        if self.draft_gpu is not None:
            _check_integer("draft_gpu", self.draft_gpu, 0)
        if (self.target is None) != (self.draft_gpu is None):
            raise ValueError(
                f"draft_gpu = {self.draft_gpu}, target = {self.target}: the gpu lane has both, the "
                "cpu lane neither"
            )

    @classmethod
    def of(cls, recipe: Recipe, pair: Path, places: Places) -> "RepositoryConfig":
        """What a recipe states, for the pair in a folder.

        places: where a gpu recipe's files lie; the models get absolute paths, so that the server
        must see the same ones.
        """
        limits = recipe.limits
        config = cls(
            recipe=str(pair.absolute()),
            draft_tokens=limits.draft_tokens,
            max_sequences=limits.max_sequences,
            max_waiting=limits.max_waiting,
            decoupled=recipe.serving.decoupled,
            time_limit=limits.time_limit,
        )
        if recipe.lane == Lane.CPU:
            return config
        engine = places.target_engine.absolute()
        target = BackendTarget(str(engine), recipe.target.gpus, recipe.target.kv_fraction)
        return replace(config, draft_gpu=recipe.draft.gpu, target=target)

    def to_parameters(self) -> dict[str, str]:
        """Triton model parameters that carry this configuration: {"masw": JSON object}."""
        return {PARAMETER: json.dumps(asdict(self), sort_keys=True)}

    @classmethod
    def from_parameters(cls, parameters: Mapping) -> "RepositoryConfig":
        """Read back `parameters` of a model's config, as Triton gives it to `initialize`.

        parameters: {"masw": {"string_value": JSON}} (or the JSON itself). Raises ValueError when
        it is absent, is no JSON object, or has fields this version does not know.
        """
        if PARAMETER not in parameters:
            raise ValueError(f"parameter {PARAMETER!r} is absent: write the repository anew")
        value = parameters[PARAMETER]
        data = json.loads(value if isinstance(value, str) else value["string_value"])
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"parameter {PARAMETER!r} has unknown fields {sorted(unknown)}")
        if data.get("target") is not None:
            data["target"] = BackendTarget(**data["target"])
        return cls(**data)


_LEAST = {"draft_tokens": 0, "max_sequences": 1, "max_waiting": 0, "engine_threads": 0}


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} = {value!r}: use an integer of at least {least}")


@dataclass(frozen=True)
class ModelConfig:
    """One model of the repository, before it becomes a `config.pbtxt`."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 1
    decoupled: bool = False
    batching: bool = False
    gpu: int | None = None

    def __post_init__(self):
        if self.max_batch_size < 1:
            raise ValueError(f"{self.name}: max_batch_size = {self.max_batch_size}: at least 1")
        for kind in (self.inputs, self.outputs):
            names = [tensor.name for tensor in kind]
            if len(set(names)) != len(names):
                raise ValueError(f"{self.name}: a tensor name occurs twice in {names}")

    def message(self, parameters: Mapping[str, str]) -> pb.ModelConfig:
        """The protobuf message of a Python model with one instance, on the CPU or on `gpu`."""
        group = pb.ModelInstanceGroup(kind="KIND_CPU", count=1)
        if self.gpu is not None:
            group = pb.ModelInstanceGroup(kind="KIND_GPU", count=1, gpus=[self.gpu])
        message = pb.ModelConfig(
            name=self.name,
            backend="python",
            max_batch_size=self.max_batch_size,
            input=[tensor.model_input() for tensor in self.inputs],
            output=[tensor.model_output() for tensor in self.outputs],
            instance_group=[group],
        )
        message.model_transaction_policy.decoupled = self.decoupled
        if self.batching:  # the default queue policy: any other stalls bursts of calls
            message.dynamic_batching.SetInParent()
        for name, value in parameters.items():
            message.parameters[name].string_value = value
        return message


def model_configs(config: RepositoryConfig) -> dict[str, pb.ModelConfig]:
    """The configuration of every model by name, in the order in which they load."""
    batch, parameters = config.max_sequences, config.to_parameters()
    models = (
        ModelConfig(
            DRAFT,
            tensors.DRAFT_INPUTS,
            tensors.DRAFT_OUTPUTS,
            batch,
            batching=True,
            gpu=config.draft_gpu,
        ),
        ModelConfig(PREPROCESSING, tensors.PREPROCESSING_INPUTS, tensors.PREPROCESSING_OUTPUTS),
        ModelConfig(POSTPROCESSING, tensors.POSTPROCESSING_INPUTS, tensors.POSTPROCESSING_OUTPUTS),
        ModelConfig(LOOP, tensors.BLS_INPUTS, tensors.BLS_OUTPUTS, decoupled=config.decoupled),
    )
    messages = {model.name: model.message(parameters) for model in models}
    return {TARGET: _target(config)} | messages | {ENSEMBLE: _ensemble()}


def _target(config: RepositoryConfig) -> pb.ModelConfig:
    """The C++ backend's model where there is an engine for it, else our Python model."""
    batch = config.max_sequences
    if config.target is not None:
        return config.target.message(TARGET, batch)
    model = ModelConfig(TARGET, tensors.TARGET_INPUTS, tensors.TARGET_OUTPUTS, batch, batching=True)
    return model.message(config.to_parameters())


def _ensemble() -> pb.ModelConfig:
    """preprocessing -> loop -> postprocessing; decoupled exactly when the loop is."""
    message = pb.ModelConfig(
        name=ENSEMBLE,
        platform="ensemble",
        max_batch_size=1,
        input=[tensor.model_input() for tensor in tensors.ENSEMBLE_INPUTS],
        output=[tensor.model_output() for tensor in tensors.ENSEMBLE_OUTPUTS],
    )
    for model, inputs, outputs in tensors.ENSEMBLE_STEPS:
        message.ensemble_scheduling.step.add(
            model_name=model, model_version=-1, input_map=inputs, output_map=outputs
        )
    return message


def write_repository(
    config: RepositoryConfig, destination: Path, sources: Path | None = None
) -> list[Path]:
    """Write <destination>/<model>/config.pbtxt and <model>/1/*.py for every model.

    sources: folder with <model>/1/model.py; the installed `masw.triton_repo` when None.
    Returns the files that changed; none when the repository is up to date. Files are replaced
    whole, so a server that reads them sees the old or the new one. Raises FileNotFoundError
    when a Python model has no model.py.
    """
    sources = sources or Path(str(importlib.resources.files("masw.triton_repo")))
    changed = []
    for name, message in model_configs(config).items():
        folder = destination / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        files = {folder / "config.pbtxt": text_format.MessageToString(message).encode()}
        if message.backend == "python":
            files |= {folder / "1" / code.name: code.read_bytes() for code in _code(sources, name)}
        changed += [path for path, content in files.items() if _replace(path, content)]
    return changed


def read_model_config(path: Path) -> pb.ModelConfig:
    """Parse one config.pbtxt; raises `text_format.ParseError` when it is not one."""
    return text_format.Parse(path.read_text(), pb.ModelConfig())


def _code(sources: Path, name: str) -> Iterable[Path]:
    folder = sources / name / "1"
    if not (folder / "model.py").is_file():
        raise FileNotFoundError(f"{folder / 'model.py'}: the model {name!r} has no code there")
    return sorted(folder.glob("*.py"))


def _replace(path: Path, content: bytes) -> bool:
    """Write `content` atomically unless the file holds it already; True when it was written."""
    if path.is_file() and path.read_bytes() == content:
        return False
    with whole_file(path) as part:
        part.write_bytes(content)
    return True
