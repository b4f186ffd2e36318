"""Device memory of target and draft, estimated from the numbers of their architectures."""

from __future__ import annotations

from dataclasses import dataclass

from ...engines.recipe import Recipe
from ..draft_plan import BYTES, DraftPlan
from ..output_folder import GIB
from ..target_plan import TargetPlan
from .finding import Finding, failed, ok, unknown
from .subject import Subject

CONTEXT = GIB  # CUDA context, communication buffers, workspaces: a guess per process
MORE_CACHE = (
    "raise target.kv_fraction, lower limits.max_length, or set target.quantization and "
    "target.kv_cache to fp8"
)


@dataclass(frozen=True)
class TargetMemory:
    """Bytes on each device of the target, of which the fullest counts."""

    plan: TargetPlan

    @property
    def recipe(self) -> Recipe:
        """The recipe of the plan."""
        return self.plan.recipe

    @property
    def weight_bytes(self) -> int:
        """Weights and scales of the rank with the most."""
        return max(map(self.plan.rank_bytes, range(self.recipe.target.ranks)))

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token on one rank."""
        return self.plan.kv_bytes_per_token

    @property
    def activation_bytes(self) -> int:
        """An estimate: the widest tensors of a full batch of tokens, and the logits."""
        target, limits, model = self.recipe.target, self.recipe.limits, self.plan.model
        widths = 4 * model.hidden_size + 3 * model.intermediate_size / target.tensor_parallel
        logits = 4 * limits.max_sequences * (limits.max_draft_tokens + 1) * model.vocab_size
        return int(target.max_num_tokens * widths * BYTES[target.dtype]) + logits

    @property
    def loaded_bytes(self) -> int:
        """Everything but the cache of keys and values."""
        return self.weight_bytes + self.activation_bytes + CONTEXT

    @property
    def sequence_bytes(self) -> int:
        """Cache of one sequence of the greatest length with its draft."""
        limits = self.recipe.limits
        return self.token_bytes * (limits.max_length + limits.max_draft_tokens)


def draft_bytes(recipe: Recipe) -> int:
    """Device memory of the draft's process. Raises ValueError for limits the draft cannot have."""
    return DraftPlan.of(recipe).total_bytes + CONTEXT


def memory_findings(subject: Subject) -> list[Finding]:
    """Whether target and draft fit: one line for the target's devices, one for a draft's own."""
    recipe = subject.recipe
    try:
        target, draft = TargetMemory(TargetPlan(recipe)), draft_bytes(recipe)
    except ValueError as error:
        return [failed("plan", str(error), "change these numbers in the recipe")]
    findings = [_target(subject, target, draft if recipe.shares_gpu else 0)]
    return findings if recipe.shares_gpu else [*findings, _draft(subject, draft)]


def _device_bytes(subject: Subject, gpus: tuple[int, ...]) -> float | None:
    """The least free bytes of these devices, or what the caller states."""
    if subject.gpu_memory is not None:
        return subject.gpu_memory * GIB
    found = [subject.machine.gpu(index) for index in gpus]
    return min(gpu.free for gpu in found) * GIB if found and None not in found else None


def _target(subject: Subject, target: TargetMemory, draft: int) -> Finding:
    """draft: bytes of a draft on one of the devices, 0 without."""
    recipe, name = subject.recipe, "memory: target"
    parts = f"weights {_gib(target.weight_bytes)} + activations {_gib(target.activation_bytes)}"
    parts += f" + context {_gib(CONTEXT)} of each GPU"
    parts += f", draft {_gib(draft)} beside them" if draft else ""
    parts += f"; one sequence needs {_gib(target.sequence_bytes)} of KV cache"
    size = _device_bytes(subject, recipe.target.gpus)
    if size is None:
        return unknown(name, f"{parts}; no GPU here", "give --gpu-memory GiB for an estimate")
    free = size - target.loaded_bytes
    if free <= 0:
        remedy = "raise target.tensor_parallel, or set target.quantization to fp8"
        return failed(name, f"{parts}: more than the {_gib(size)} of a GPU", remedy)
    share = recipe.target.kv_fraction
    if draft > (1 - share) * free:  # the target may have taken its share first
        return failed(name, f"{parts}; {_left(free, share)}", _smaller_share(draft, free))
    return _cache(recipe, target, name, parts, share * (free - draft))


def _cache(recipe: Recipe, target: TargetMemory, name: str, parts: str, pool: float) -> Finding:
    """The cache in the worse order of loading, the draft first."""
    sequences = int(pool // target.sequence_bytes)
    found = f"{parts}; a KV cache of {_gib(pool)} holds {sequences}"
    if sequences < 1:
        return failed(name, found, MORE_CACHE)
    if sequences < recipe.limits.max_sequences:
        found += f" of limits.max_sequences {recipe.limits.max_sequences}: long ones will wait"
    return ok(name, found)


def _left(free: float, share: float) -> str:
    return f"kv_fraction {share:g} leaves {_gib((1 - share) * free)} of {_gib(free)} for the draft"


def _smaller_share(draft: int, free: float) -> str:
    most = int(100 * (1 - draft / free)) / 100
    if most <= 0:
        return "give draft.gpu a device that is not in target.gpus"
    return f"set target.kv_fraction to {most:g} or less, or draft.gpu to another device"


def _draft(subject: Subject, draft: int) -> Finding:
    name, gpu = "memory: draft", subject.recipe.draft.gpu
    found = f"weights, slot memory of all sequences, activations and CUDA context: {_gib(draft)}"
    size = _device_bytes(subject, (gpu,))
    if size is None:
        return unknown(name, f"{found}; no GPU here", "give --gpu-memory GiB for an estimate")
    found += f" of {_gib(size)}"
    if draft > size:
        remedy = "lower limits.max_sequences or limits.max_length, or raise memory.interval"
        return failed(name, found, remedy)
    return ok(name, found)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
