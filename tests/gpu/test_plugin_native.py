"""The PTX of the TensorRT plugins on a GPU, launched as TensorRT launches it, against the oracle.

Loaded and started through the CUDA driver with input pointers, scalars and output pointers alone.
"""

import ctypes
import math

import pytest
import torch

from masw.plugins.slot_attention.rule import MemoryRule
from tests.kernel_cases import SHAPES, Case

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MOST_PARTS = 16
RULE = MemoryRule(16, 33, 16, 3)
BLOCKS = {"decode": ((354, 48, 0), (1, 1, 1)), "chunk": ((100, 0), (150, 3))}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def aot():
    """The module that compiles the plugins' kernels."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; tests/unit/test_plugin.py interprets these launches")
    from masw.plugins.slot_attention import aot

    return aot


@pytest.fixture(scope="module")
def sm(aot) -> int:
    """Compute capability of the device x 10."""
    major, minor = torch.cuda.get_device_capability()
    if major * 10 + minor not in aot.TARGETS:
        pytest.skip(f"no kernels for compute capability {major}.{minor}")
    return major * 10 + minor


def start(kernel, grid: tuple[int, int, int], arguments: list[torch.Tensor | int]) -> None:
    """Launches a compiled kernel on the current stream; waits for it."""
    cuda, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.synchronize()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), kernel.ptx.encode()))
    _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()))
    _check(cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, kernel.shared))
    values = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else ctypes.c_int32(x)
        for x in arguments
    ]
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    block = (kernel.threads, 1, 1)
    _check(cuda.cuLaunchKernel(function, *grid, *block, kernel.shared, stream, addresses, None))
    torch.cuda.synchronize()
    _check(cuda.cuModuleUnload(module))


def _check(status: int) -> None:
    assert status == 0, f"CUDA driver error {status}"


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tactic_equals_the_dense_oracle(aot, sm, shape, block, parts):
    """All types and head sizes, ragged batches with slots and padding, over poisoned memories."""
    dtype, dim, heads, kv_heads = shape
    inputs = Case(RULE, *shape, *BLOCKS[block]).on("cuda")
    attention = aot.Attention(heads, kv_heads, dim, NAMES[dtype], RULE)
    batch, positions = inputs.block.kind.shape
    rows = (batch, positions, heads)
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    kernels = {plan: aot.compile_partial(attention, plan, sm) for plan in aot.plans(attention)}
    for plan, kernel in kernels.items():
        if kernel.shared > limit:
            continue
        partial = torch.full((*rows, parts, dim), math.nan, device="cuda")
        lse = torch.full((*rows, parts), math.nan, device="cuda")
        out = torch.full((*rows, dim), math.nan, device="cuda", dtype=dtype)
        scalars = [positions, inputs.memory_k.shape[2], parts]
        tiles = -(-positions * heads // kv_heads // plan.block_m)
        grid = (tiles * parts, kv_heads, batch)
        start(kernel, grid, [*inputs.contiguous, *scalars, partial, lse])
        merge = aot.compile_merge(dim, NAMES[dtype], MOST_PARTS, sm)
        start(merge, (math.prod(rows), 1, 1), [partial, lse, parts, out])
        inputs.check(out.transpose(1, 2))
