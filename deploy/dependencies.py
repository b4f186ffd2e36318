"""Prints what masw still needs in the container, as requirements for pip; or checks it (--check).

The container's own torch, TensorRT, transformers and NumPy stay as they are: they are tested with
each other, and engines fit one version only. So masw is installed without its dependencies, and of
those only the light ones that are missing are added.
"""

import importlib
import importlib.metadata
import importlib.util
import sys

LIGHT = {  # module: requirement
    "google.protobuf": "protobuf>=5",
    "grpc": "grpcio>=1.60",
    "psutil": "psutil>=5.9",
    "pydantic": "pydantic>=2.6",
    "rapidjson": "python-rapidjson>=0.9",
    "rich": "rich>=13",
    "safetensors": "safetensors>=0.4.3",
    "tritonclient": "tritonclient[grpc]>=2.60",
    "typer": "typer>=0.15",
    "yaml": "pyyaml>=6",
}
HELD = ("numpy", "tensorrt", "tensorrt_llm", "torch", "transformers")  # the container's, untouched
USED = (
    "masw.build.commands",
    "masw.engines.pair",
    "masw.engines.recipe",
    "masw.engines.tensorrt_draft",
    "masw.triton_repo.service",
)


def is_missing(module: str) -> bool:
    """Whether a module cannot be found; nothing is imported but its parents."""
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


def missing() -> list[str]:
    """Requirements to install, sorted."""
    return sorted(requirement for module, requirement in LIGHT.items() if is_missing(module))


def check() -> None:
    """Imports what a server imports; TensorRT itself needs a GPU and is only looked for."""
    absent = [module for module in HELD if is_missing(module)]
    if absent:
        sys.exit(f"the image lacks {', '.join(absent)}; use a tritonserver …-trtllm-python-py3")
    for module in (*LIGHT, *USED):
        importlib.import_module(module)


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        check()
    else:
        print("\n".join(missing()))
