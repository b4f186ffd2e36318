"""A user's request, read from its tensors and checked before any work."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..engines.messages import InvalidRequest, Sampling
from ..engines.sequence import GenerationRequest
from ..engines.text import TextCodec

Values = dict[str, np.ndarray]


def _all_zero(value: np.ndarray) -> bool:
    return not np.any(value)


def _all_empty(value: np.ndarray) -> bool:
    return not any(value.ravel().tolist())


def _one_of(*allowed: float) -> Callable[[np.ndarray], bool]:
    return lambda value: bool(np.isin(value, allowed).all())


# Inputs of NVIDIA's layout that would change the output in ways the draft and the verifier do not
# know; taken only where they ask for nothing. length_penalty acts on beams, of which there is one.
NEUTRAL: dict[str, Callable[[np.ndarray], bool]] = {
    "beam_width": _one_of(1),
    "num_return_sequences": _one_of(1),
    "length_penalty": _one_of(0, 1),
    "repetition_penalty": _one_of(1),
    "presence_penalty": _all_zero,
    "frequency_penalty": _all_zero,
    "return_log_probs": _all_zero,
    "return_context_logits": _all_zero,
    "return_generation_logits": _all_zero,
    "bad_words": _all_empty,
    "embedding_bias_words": _all_empty,
    "embedding_bias_weights": _all_zero,
    "decoder_text_input": _all_empty,
    "prompt_embedding_table": lambda value: value.size == 0,
    "prompt_vocab_size": _all_zero,
    "prompt_table_extra_id": _all_zero,
    "lora_task_id": _all_zero,
    "lora_weights": lambda value: value.size == 0,
    "lora_config": lambda value: value.size == 0,
    "guided_decoding_guide_type": _all_empty,
    "guided_decoding_guide": _all_empty,
}


@dataclass(frozen=True)
class Ask:
    """What a user wants: the generation itself, and how to answer it.

    by_text: answer with text, otherwise with ids. time_limit in seconds. echo: prompt first.
    """

    generation: GenerationRequest
    by_text: bool
    stream: bool
    stop_words: tuple[str, ...]
    echo: bool
    statistics: bool
    time_limit: float


def read_ask(values: Values, codec: TextCodec, vocab: int, end_ids: tuple[int, ...]) -> Ask:
    """Reads the inputs of `tensorrt_llm_bls` (without batch axis); absent ones have defaults.

    end_ids: the model's own, used where the request names none. The time limit is infinite where
    the request has none. Raises InvalidRequest naming field and limit.
    """
    _refuse_unsupported(values)
    by_text = "text_input" in values
    if by_text == ("input_ids" in values):
        raise InvalidRequest("give exactly one of text_input and input_ids")
    stop_words = tuple(w for w in strings(values, "stop_words") if w)
    echo = not flag(values, "exclude_input_in_output", True)
    if echo and stop_words and not by_text:
        raise InvalidRequest("stop_words with input_ids needs exclude_input_in_output = true")
    limit = scalar(values, "time_limit", float("inf"))
    if not limit > 0:
        raise InvalidRequest(f"time_limit is {limit}; it must be above 0 seconds")
    return Ask(
        _generation(values, _prompt_ids(values, codec, vocab), vocab, end_ids),
        by_text,
        flag(values, "stream"),
        stop_words,
        echo,
        flag(values, "return_perf_metrics"),
        limit,
    )


def _refuse_unsupported(values: Values) -> None:
    for name, is_neutral in NEUTRAL.items():
        if name in values and not is_neutral(values[name]):
            shown = values[name].ravel()[:4].tolist()
            raise InvalidRequest(f"{name} is {shown}; it is not supported and would be ignored")


def _prompt_ids(values: Values, codec: TextCodec, vocab: int) -> tuple[int, ...]:
    template = flag(values, "apply_chat_template")
    if "text_input" in values:
        return tuple(codec.encode(text_of(values, "text_input"), template))
    if template:
        raise InvalidRequest("apply_chat_template is true; it needs text_input")
    ids = values["input_ids"]
    if not len(ids):
        raise InvalidRequest("input_ids is empty; give 1 or more ids")
    if ids.min() < 0 or ids.max() >= vocab:
        raise InvalidRequest(f"input_ids has an id outside 0 to {vocab - 1}")
    return tuple(ids.tolist())


def _generation(
    values: Values, ids: tuple[int, ...], vocab: int, own_end_ids: tuple[int, ...]
) -> GenerationRequest:
    if "max_tokens" not in values:
        raise InvalidRequest("max_tokens is missing; it must be 1 or more")
    end_ids = _end_ids(scalar(values, "end_id"), vocab, own_end_ids)
    min_tokens = scalar(values, "min_tokens", 0)
    if min_tokens > 1 and len(end_ids) > 1:
        raise InvalidRequest("min_tokens needs end_id: this model has several end ids")
    seed = scalar(values, "seed")
    names = ("temperature", "top_k", "top_p")
    return GenerationRequest(
        ids=ids,
        max_tokens=scalar(values, "max_tokens"),
        sampling=Sampling.from_request(*(scalar(values, name) for name in names)),
        seed=secrets.randbits(63) if seed is None else seed,
        draft_tokens=scalar(values, "num_draft_tokens"),
        use_draft_logits=flag(values, "use_draft_logits", True),
        adaptive=flag(values, "adaptive_draft"),
        min_tokens=min_tokens,
        end_ids=end_ids,
    )


def _end_ids(given: int | None, vocab: int, own: tuple[int, ...]) -> tuple[int, ...]:
    if given is None:
        return own
    if given == -1:  # TensorRT-LLM's "no end id"
        return ()
    if not 0 <= given < vocab:
        raise InvalidRequest(f"end_id is {given}; it must be -1 or 0 to {vocab - 1}")
    return (given,)


def scalar(values: Values, name: str, default=None):
    """First element of an input as a Python value; `default` where it is absent."""
    if name not in values:
        return default
    if not values[name].size:
        raise InvalidRequest(f"{name} has no element; give 1")
    return values[name].ravel()[0].item()


def flag(values: Values, name: str, default: bool = False) -> bool:
    """A BOOL input."""
    return bool(scalar(values, name, default))


def strings(values: Values, name: str) -> list[str]:
    """A STRING input of any length as text. Raises InvalidRequest for bytes that are no UTF-8."""
    try:
        return [word.decode() for word in values.get(name, np.empty(0, object)).ravel()]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is no valid UTF-8: {error}") from error


def text_of(values: Values, name: str) -> str:
    """A STRING[1] input."""
    words = strings(values, name)
    if not words:
        raise InvalidRequest(f"{name} has no element; give 1")
    return words[0]
