"""The draft inside TensorRT-LLM's PyTorch backend, as a user-provided drafter (1.0 to 1.4).

The backend calls the drafter before each step of the target, in every rank. What it asks of the two
classes is TensorRT-LLM's; what they do is in request_drafts.py. Their base classes exist where
TensorRT-LLM does, so the classes are made when they are needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .pair import DraftMode
from .request_drafts import DrafterSettings, RequestDrafts, Wanted
from .trtllm_module import load_trtllm

PADDING = 0  # as the backend pads; the target accepts it only where it is its own token


def drafter_config(
    pair: Path,
    max_draft_len: int,
    mode: DraftMode = DraftMode.SLOTS,
    max_sequences: int = 8,
) -> Any:
    """The `speculative_config` of an `LLM(backend="pytorch")` that drafts with a pair's draft.

    max_sequences: as many as the LLM's max_batch_size; requests beyond have no drafts. Raises
    PairError for an unfit pair and ImportError naming the container without TensorRT-LLM.
    """
    drafts = RequestDrafts(DrafterSettings(Path(pair), max_draft_len, mode, max_sequences))
    return load_trtllm("tensorrt_llm.llmapi").UserProvidedDecodingConfig(
        max_draft_len=max_draft_len,
        drafter=make_drafter(drafts),
        resource_manager=make_resources(drafts),
    )


def make_drafter(drafts: RequestDrafts) -> Any:
    """A `Drafter` of TensorRT-LLM over `drafts`; it pickles as a call of this function."""
    base = load_trtllm("tensorrt_llm._torch.speculative.drafter").Drafter
    length = drafts.settings.max_draft_len
    # Later versions take the draft length and pad drafts to it for CUDA graphs themselves.
    known = inspect.signature(base.__init__).parameters
    lengths = {n: length for n in ("max_draft_len", "max_total_draft_tokens") if n in known}
    pads_itself = hasattr(base, "pad_draft_tokens_for_cuda_graph")

    class MaswDrafter(base):
        """Sets the draft tokens of every generation request before the target's step."""

        def __init__(self):
            super().__init__(**lengths)
            self.max_draft_len = length
            self.drafts = drafts

        def prepare_draft_tokens(
            self, scheduled_requests: Any, resource_manager: Any = None
        ) -> None:
            padded = 0 if pads_itself else self.max_draft_len
            requests = scheduled_requests.generation_requests
            set_draft_tokens(self.drafts, requests, self.max_draft_len, padded)

        def __reduce__(self):
            return make_drafter, (self.drafts,)

    return MaswDrafter()


def make_resources(drafts: RequestDrafts) -> Any:
    """A `BaseResourceManager` that frees a request's draft sequence; pickles as `make_drafter`."""
    base = load_trtllm("tensorrt_llm._torch.pyexecutor.resource_manager").BaseResourceManager

    class MaswResources(base):
        """Draft sequences as a resource; they never keep a request from being scheduled."""

        def get_max_resource_count(self) -> int:
            return drafts.settings.max_sequences

        def get_needed_resource_to_completion(self, request: Any) -> int:
            return 0

        def free_resources(self, request: Any) -> None:
            drafts.forget(request.request_id)

        def shutdown(self) -> None:
            drafts.close()

        def __reduce__(self):
            return make_resources, (drafts,)

    return MaswResources()


def set_draft_tokens(
    drafts: RequestDrafts, requests: Iterable[Any], limit: int, padded: int = 0
) -> None:
    """Sets `py_draft_tokens` of LlmRequests: up to `limit` ids, or `[]` where there are none.

    padded: length to which those that have drafts are padded (0: not at all).
    """
    requests = list(requests)
    found = drafts.propose([wanted_by(request, limit) for request in requests])
    for request in requests:
        ids = found.get(request.request_id, [])
        padding = [PADDING] * (padded - len(ids)) if ids else []
        request.py_draft_tokens = ids + padding


def wanted_by(request: Any, limit: int) -> Wanted:
    """What an LlmRequest has and may get: one token less than it may still generate."""
    ids = list(request.get_tokens(0))
    room = request.py_orig_prompt_len + request.py_max_new_tokens - len(ids) - 1
    if getattr(request, "py_disable_speculative_decoding", False):
        room = 0
    return Wanted(request.request_id, ids, min(limit, room), request.py_end_id)
