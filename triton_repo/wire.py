"""Triton requests and responses as plain arrays; the one place that touches their API.

`pb_utils` is passed in: the module exists only inside a Triton stub process.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..engines.memory import CapacityError
from ..engines.messages import InvalidRequest

CANARY = "masw_canary"
DRAFT_STATE = "draft state: "  # starts the message of a draft error the loop can repair


class Overloaded(RuntimeError):
    """As many requests wait as may; try again later."""


def settings(args: dict) -> SimpleNamespace:
    """The repository's configuration, as `build/repository.py` wrote it into the model's."""
    parameters = json.loads(args["model_config"])["parameters"]
    return SimpleNamespace(**json.loads(parameters["masw"]["string_value"]))


def is_canary(request: Any) -> bool:
    """Whether the supervisor only asks for a sign of life."""
    return CANARY in json.loads(request.parameters() or "{}")


def inputs(request: Any) -> dict[str, np.ndarray]:
    """All inputs of a request by name, without the batch axis."""
    return {tensor.name(): tensor.as_numpy()[0] for tensor in request.inputs()}


def response(pb_utils: Any, outputs: dict[str, np.ndarray]) -> Any:
    """A response of arrays by name."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(n, array) for n, array in outputs.items()])


def failure(pb_utils: Any, error: Exception) -> Any:
    """A response that carries an error: INVALID_ARGUMENT for the user's own, and so on.

    The status stands in front of the message too, because streams carry only that.
    """
    status, code = _status(error)
    code = getattr(pb_utils.TritonError, code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{status}: {error}", code))


def _status(error: Exception) -> tuple[str, str]:
    """gRPC's and Triton's name for the kind of an error."""
    if isinstance(error, InvalidRequest | CapacityError):
        return "INVALID_ARGUMENT", "INVALID_ARG"
    if isinstance(error, Overloaded):
        return "UNAVAILABLE", "UNAVAILABLE"
    return "INTERNAL", "INTERNAL"


def text(*values: str) -> np.ndarray:
    """(n,) array of strings."""
    return np.array([value.encode() for value in values], dtype=object)


def batched(value: Any, dtype: type) -> np.ndarray:
    """A scalar or array with the batch axis in front."""
    array = np.asarray(value, dtype=dtype)
    return array.reshape(1, *(array.shape or (1,)))
