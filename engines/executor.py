"""What runs a draft engine's calls on tensors that stay where they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .engine_folder import ENGINE, DraftEngine, EngineFolderError
from .tensorrt_module import load_tensorrt


class ExecutorError(RuntimeError):
    """TensorRT refused a call; its log says why."""


class Executor(ABC):
    """Runs a compiled draft."""

    device: torch.device

    @abstractmethod
    def bind(self, profile: str, tensors: dict[str, Tensor]) -> Callable[[], None]:
        """A call with these inputs and outputs, by the names and in the shapes of draft_io.py.

        Each time it is made, the call reads the inputs and writes the outputs in place, on
        torch's current stream, without waiting. The tensors must outlive the call.
        """


class TensorRTExecutor(Executor):
    """The engine of a folder on the current CUDA device.

    Each bound call has an execution context and scratch memory of its own, whose shapes and
    addresses never change: a CUDA graph needs that, and calls may run at the same time.
    """

    def __init__(self, directory: Path, engine: DraftEngine):
        trt = load_tensorrt(engine.builder.module)
        if not torch.cuda.is_available():
            raise EngineFolderError(
                f"{directory} is an engine for a GPU and there is none; serve the pair with a "
                "Hugging Face folder as draft/, which runs on the CPU"
            )
        self.device = torch.device("cuda", torch.cuda.current_device())
        capability = ".".join(map(str, torch.cuda.get_device_capability(self.device)))
        engine.check_use(version=trt.__version__, compute_capability=capability)
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine((directory / ENGINE).read_bytes())
        if self._engine is None:
            raise EngineFolderError(
                f"TensorRT cannot read {directory / ENGINE}; build it again with `masw-build draft`"
            )
        self._trt = trt
        self._profiles = {profile.name: i for i, profile in enumerate(engine.io.profiles)}
        _check_tensors(self._engine, engine)

    def bind(self, profile: str, tensors: dict[str, Tensor]) -> Callable[[], None]:
        """See `Executor.bind`."""
        context = self._context(profile)
        inputs = self._trt.TensorIOMode.INPUT
        for name, tensor in tensors.items():
            done = context.set_tensor_address(name, tensor.data_ptr())
            if self._engine.get_tensor_mode(name) == inputs:
                done = done and context.set_input_shape(name, tuple(tensor.shape))
            if not done:
                raise ExecutorError(
                    f"TensorRT refused {name} {tuple(tensor.shape)} in profile {profile}"
                )
        size = max(1, context.update_device_memory_size_for_shapes())
        scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
        context.set_device_memory(scratch.data_ptr(), size)

        def run() -> None:
            assert len(scratch) == size  # keeps the scratch memory as long as the call
            if not context.execute_async_v3(torch.cuda.current_stream(self.device).cuda_stream):
                raise ExecutorError(f"a call of profile {profile} failed; TensorRT's log says why")

        return run

    def _context(self, profile: str) -> Any:
        """A new context of a profile that has no scratch memory yet."""
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise ExecutorError("TensorRT made no execution context; is the GPU's memory full?")
        stream = torch.cuda.current_stream(self.device)
        number = self._profiles[profile]
        if not context.set_optimization_profile_async(number, stream.cuda_stream):
            raise ExecutorError(f"TensorRT refused profile {profile}")
        stream.synchronize()
        return context


def _check_tensors(found: Any, engine: DraftEngine) -> None:
    """Refuses an engine file whose tensors are not those that config.json states."""
    names = {found.get_tensor_name(i) for i in range(found.num_io_tensors)}
    for tensor in (*engine.io.inputs, *engine.io.outputs):
        if tensor.name not in names or tuple(found.get_tensor_shape(tensor.name)) != tensor.dims:
            raise EngineFolderError(
                f"{ENGINE} has no tensor {tensor.name} of shape {tensor.dims}, which config.json "
                "states; build it again with `masw-build draft`"
            )
    if found.num_optimization_profiles != len(engine.io.profiles):
        raise EngineFolderError(
            f"{ENGINE} has {found.num_optimization_profiles} profiles, not "
            f"{len(engine.io.profiles)}; build it again with `masw-build draft`"
        )
