"""The training loop: only the adaptor learns, the backbone stays as it is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...engines.adaptor import Adaptor
from ...engines.decoder import Attend, Decoder
from ...engines.pair import DTYPES
from ...engines.whole_file import whole_file
from ...plugins.slot_attention.rule import MemoryRule
from .losses import weighted_loss
from .schedule import Batch, Schedule
from .settings import Loss, TrainSettings
from .stream import causal_attention, stream_attention, stream_block


@dataclass(frozen=True)
class Ranks:
    """Data-parallel processes, as torchrun starts them."""

    rank: int = 0
    world: int = 1

    @classmethod
    @contextmanager
    def joined(cls, device: torch.device) -> Iterator[Ranks]:
        """The group that torchrun describes in the environment; alone without it.

        device: this rank's own. Ranks leave together: one that ends while another still talks to
        it would abort that one.
        """
        if "WORLD_SIZE" not in os.environ:
            yield cls()
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)  # what the collectives of this rank run on
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            yield cls(dist.get_rank(), dist.get_world_size())
            dist.barrier()
        finally:
            dist.destroy_process_group()

    @staticmethod
    def device(name: str) -> torch.device:
        """The device of this rank: of "cuda" the one that torchrun's LOCAL_RANK numbers."""
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return device

    def sum(self, tensors: list[Tensor]) -> None:
        """Replaces tensors by their sums over all ranks."""
        if self.world > 1:
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(flat)
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))


@dataclass(frozen=True)
class StepReport:
    """One optimiser step: loss per weighted position (nats), gradient norm, raw tokens per s."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    tokens_per_s: float


class Trainer:
    """Trains `adaptor` (float32) beside a frozen decoder of the computing dtype, in place."""

    def __init__(
        self,
        decoder: Decoder,
        adaptor: Adaptor,
        schedule: Schedule,
        teacher: Decoder | None = None,
        ranks: Ranks = Ranks(),
    ):
        self.settings: TrainSettings = schedule.settings
        if self.settings.loss is Loss.SELF:
            teacher = decoder
        if (teacher is None) != (self.settings.loss is Loss.NEXT_TOKEN):
            raise ValueError(f"loss {self.settings.loss} and teacher do not go together")
        if teacher is not None and teacher.config.vocab_size != decoder.config.vocab_size:
            raise ValueError(
                f"the target has {teacher.config.vocab_size} token ids, the draft "
                f"{decoder.config.vocab_size}; kl-target needs the same vocabulary"
            )
        self.decoder, self.adaptor, self.teacher = decoder, adaptor, teacher
        self.schedule, self.ranks, self.step = schedule, ranks, 0
        self.device = decoder.embed_tokens.weight.device
        self.parameters = list(adaptor.requires_grad_(True).parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=self.settings.weight_decay,
        )
        self._attends: dict[tuple[int, int], Attend] = {}

    def run(self) -> Iterator[StepReport]:
        """Takes the steps that are left, one report each."""
        while self.step < self.settings.steps:
            yield self._take_step()

    def _take_step(self) -> StepReport:
        started, batch = time.perf_counter(), self.schedule.batch(self.step)
        rate = self.schedule.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=False)
        loss = torch.zeros((), device=self.device)
        for ids, weight in self._micro_batches(batch):
            part = self.loss(ids, weight, batch.interval) / batch.total_weight
            part.backward()
            loss += part.detach()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.ranks.sum([loss, *gradients])
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {self.step}: the gradient norm is {norm.item()}")
        self.optimizer.step()
        self.step += 1
        seconds = time.perf_counter() - started
        return StepReport(
            self.step, loss.item(), norm.item(), rate, batch.tokens, batch.tokens / seconds
        )

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        size = max(1, self.settings.micro_tokens // batch.ids.shape[1])
        for start in range(0, len(batch.ids), size):
            part = slice(start, start + size)
            yield torch.from_numpy(batch.ids[part]).long(), torch.from_numpy(batch.weight[part])

    def loss(self, ids: Tensor, weight: Tensor, interval: int) -> Tensor:
        """Weighted sum of the loss over raw positions; ids, weight (B, n) on the CPU."""
        places = weight[:, :-1].nonzero(as_tuple=True)
        weights, targets = weight[places], ids[places[0], places[1] + 1]
        ids, weights, targets, *places = (
            tensor.to(self.device) for tensor in (ids, weights, targets, *places)
        )
        precision = DTYPES[self.settings.dtype]
        with torch.autocast(self.device.type, precision, enabled=precision != torch.float32):
            return weighted_loss(
                self.decoder,
                self._hidden(ids, interval)[tuple(places)],
                targets,
                weights,
                self.settings.next_token,
                self.teacher,
                self._teacher_hidden(ids, tuple(places)),
            )

    def _hidden(self, ids: Tensor, interval: int) -> Tensor:
        block = stream_block(self.settings.rule(interval), ids)
        key = interval, ids.shape[1]
        if key not in self._attends:
            self._attends[key] = stream_attention(block)
        recompute = self.settings.recompute
        return self.decoder.run(block, self._attends[key], self.adaptor, recompute)[0]

    @torch.no_grad()
    def _teacher_hidden(self, ids: Tensor, places: tuple[Tensor, ...]) -> Tensor | None:
        if self.teacher is None:
            return None
        block = stream_block(MemoryRule.full(ids.shape[1]), ids)
        return self.teacher.run(block, causal_attention)[0][places]

    def save_state(self, path: Path) -> None:
        """Writes all that a resumed run needs, atomically, as safetensors.

        Raises FloatingPointError for weights that are no longer finite.
        """
        if not self.adaptor.is_finite():
            raise FloatingPointError(
                f"step {self.step} left weights that are not finite; use a lower learning_rate"
            )
        tensors = {f"adaptor/{name}": tensor for name, tensor in self.adaptor.state_dict().items()}
        for name, parameter in self.adaptor.named_parameters():
            for key, tensor in self.optimizer.state[parameter].items():
                tensors[f"{key}/{name}"] = tensor
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with whole_file(path) as part:
            save_file(tensors, part, {"step": str(self.step)})

    def load_state(self, path: Path) -> None:
        """Goes on from a saved state: the same weights as if it had never stopped."""
        with safe_open(path, framework="pt", device=str(self.device)) as file:
            self.step = _step_of(file.metadata(), path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            key, _, parameter = name.partition("/")
            groups.setdefault(key, {})[parameter] = tensor
        self.adaptor.load_state_dict(groups.pop("adaptor"))
        for name, parameter in self.adaptor.named_parameters():
            found = {key: named[name] for key, named in groups.items() if name in named}
            if found:
                self.optimizer.state[parameter] = found


def _step_of(header: dict[str, str] | None, path: Path) -> int:
    if not (header or {}).get("step", "").isdecimal():
        raise ValueError(f"{path} is no state of a training run; give another --out")
    return int(header["step"])
