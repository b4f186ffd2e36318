"""The compiled draft: γ steps of an engine back to back, fed from each other on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ..plugins.slot_attention.block import Block
from .acceptance import adjust, sample
from .draft_calls import DraftingSteps, EngineCall
from .draft_numbers import CATCH_UP_TOKENS, Bucket, DraftingPlan, Layout, pack_chunk
from .draft_turns import DraftTurns, Turn
from .engine_folder import DraftEngine
from .executor import Executor
from .memory import SlotMemory
from .messages import DraftCall, InvalidRequest, Proposal
from .streams import Streams


class TensorRTDraft(DraftTurns):
    """A compiled draft over slot memory in torch.

    Everything that a proposal's calls need but the ids is known beforehand and sent in two copies;
    the host waits once, for all proposed ids. Backlogs of more than two tokens are fed in prefill
    calls of at most a chunk, which the host does not wait for.
    """

    def __init__(
        self,
        engine: DraftEngine,
        executor: Executor,
        *,
        max_length: int | None = None,
        max_draft_tokens: int | None = None,
        idle_seconds: float = 600.0,
    ):
        io = engine.io
        memory = SlotMemory(
            io.rule,
            layers=io.layers,
            kv_heads=io.kv_heads,
            head_dim=io.head_dim,
            rows=io.max_sequences,
            max_length=_within("max_length", max_length, io.max_length),
            dtype=getattr(torch, io.dtype),
            device=executor.device,
            capacity=io.capacity,
        )
        gamma = _within("max_draft_tokens", max_draft_tokens, engine.draft_tokens)
        super().__init__(memory, io.vocab_size, gamma, idle_seconds)
        self.io, self.executor = io, executor
        self._streams = Streams(executor.device)
        self._calls: dict[tuple[str, Layout], EngineCall] = {}
        self._steps: dict[Bucket, DraftingSteps] = {}
        if memory.k.is_cuda:
            torch.cuda.synchronize(memory.k.device)  # the memory's zeros, before other streams

    @torch.inference_mode()
    def propose(self, calls: Sequence[DraftCall]) -> list[Proposal | Exception]:
        """See `Draft.propose`. Calls without draft tokens return before the device is done."""
        return self._serve(calls, time.monotonic())

    def _check(self, call: DraftCall) -> None:
        super()._check(call)
        if call.draft_tokens and not call.sampling.greedy and not self.io.logits:
            raise InvalidRequest(
                f"temperature is {call.sampling.temperature}; this draft engine returns no logits "
                "and drafts with temperature 0 only: build it with logits, or draft 0 tokens"
            )

    def _run(self, turns: Sequence[Turn]) -> None:
        """Drafts first where nothing is to be prefilled: that runs beside the others' prefill."""
        waiting = {turn.place for turn in turns if self._prefill(turn)}
        drafting = [turn for turn in turns if turn.draft_tokens]
        self._draft([turn for turn in drafting if turn.place not in waiting])
        self._draft([turn for turn in drafting if turn.place in waiting])

    # --- prefill

    def _prefill(self, turn: Turn) -> bool:
        """Feeds what of a backlog is too long for a drafting call; whether there was any."""
        if turn.draft_tokens and len(turn.backlog) <= CATCH_UP_TOKENS:
            return False
        stop = len(turn.backlog) - bool(turn.draft_tokens)  # drafting begins with one token
        for start in range(0, stop, self.io.chunk):
            self._feed_chunk(turn, turn.backlog[start : min(start + self.io.chunk, stop)])
        turn.backlog = turn.backlog[stop:]
        return True

    def _feed_chunk(self, turn: Turn, ids: list[int]) -> None:
        block = self.memory.block([turn.row], [ids])
        most = self.io.profiles[1].positions[2]
        packed, layout = pack_chunk(self.io, turn.row, block.fed[0], ids, most)
        with self._streams.prefilling(turn.row):
            call = self._call("prefill", layout)
            call.load(packed[0])
            call.run()
            self._append(call, block)
        self._advance(block)
        turn.sequence.fed.extend(ids)

    # --- drafting

    def _draft(self, turns: Sequence[Turn]) -> None:
        """Feeds backlogs of one or two tokens and proposes; the last proposed id is not fed."""
        if not turns:
            return
        plan = DraftingPlan(
            tuple(turn.row for turn in turns),
            tuple(self.memory.fed[turn.row] for turn in turns),
            tuple(tuple(turn.backlog) for turn in turns),
            tuple(turn.draft_tokens for turn in turns),
        )
        with self._streams.drafting(plan.rows):
            steps = self._steps_of(Bucket.of(len(turns), plan.steps, self.io.max_sequences))
            steps.load(*plan.pack(self.io, steps.bucket.batch))
            self._enqueue(steps, plan, turns)
            self._advance(self._block(plan.rows, plan.fed, plan.fed_counts))
            chosen = steps.chosen[:, : len(turns)].T.tolist()  # waits for the device
        for turn, ids in zip(turns, chosen, strict=True):
            turn.ids = ids[: turn.draft_tokens]
            turn.sequence.fed.extend([*turn.backlog, *turn.ids[:-1]])

    def _enqueue(self, steps: DraftingSteps, plan: DraftingPlan, turns: Sequence[Turn]) -> None:
        """All steps; as a CUDA graph where nothing is sampled, from a bucket's second time on."""
        greedy = all(turn.random is None for turn in turns)
        if greedy and steps.graph is not None:
            steps.graph.replay()
            return
        self._run_steps(steps, plan, turns)
        if greedy and self.memory.k.is_cuda:  # the run just done is what a capture needs first
            steps.graph = self._capture(steps, plan, turns)

    def _capture(
        self, steps: DraftingSteps, plan: DraftingPlan, turns: Sequence[Turn]
    ) -> torch.cuda.CUDAGraph:
        """The steps as a graph; capturing runs nothing."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.memory.k.device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._run_steps(steps, plan, turns)
        return graph

    def _run_steps(self, steps: DraftingSteps, plan: DraftingPlan, turns: Sequence[Turn]) -> None:
        for step, block in enumerate(self._blocks(plan)):
            call = steps.run(step)
            self._sample(steps, step, turns)
            self._append(call, block)

    def _sample(self, steps: DraftingSteps, step: int, turns: Sequence[Turn]) -> None:
        """Draws the ids of a step where they are not the best ones; the host does not wait."""
        for i, turn in enumerate(turns):
            if turn.random is None or step >= turn.draft_tokens:
                continue
            logits = steps.call(step).tensors["logits"][i]  # (V,)
            adjusted = adjust(logits, turn.call.sampling)
            steps.chosen[step, i : i + 1] = sample(adjusted, turn.random)
            if turn.call.return_logits:
                self._streams.hand_over(adjusted)
                turn.logits.append(adjusted)

    # --- memory and buffers

    def _append(self, call: EngineCall, block: Block | None) -> None:
        """Writes a call's keys and values to the memory; on a GPU what the call itself says."""
        new_k, new_v = call.tensors["new_k"], call.tensors["new_v"]
        if not self.memory.k.is_cuda:
            self.memory.store(block, new_k, new_v)
            return
        from ..plugins.slot_attention.launch import append_to  # Triton is there where CUDA is

        append_to(self.memory.k, self.memory.v, self.io.rule, call.placed, new_k, new_v)

    def _advance(self, block: Block) -> None:
        """Counts the tokens of a block as fed."""
        self.memory.advance(block)
        self.fed_tokens += sum(block.raw_counts)

    def _blocks(self, plan: DraftingPlan) -> list[Block | None]:
        """What each step appends, for the host's own appends."""
        if self.memory.k.is_cuda:
            return [None] * plan.steps
        pairs = zip(plan.fed_before().tolist(), plan.counts().tolist(), strict=True)
        return [self._block(plan.rows, fed, counts) for fed, counts in pairs]

    def _block(self, rows: Sequence[int], fed: Sequence[int], counts: Sequence[int]) -> Block:
        """A block on the host that says where tokens belong; their ids do not matter for that."""
        return Block.build(self.io.rule, rows, fed, [[0] * count for count in counts])

    def _steps_of(self, bucket: Bucket) -> DraftingSteps:
        if bucket not in self._steps:
            step, _, catch_up = self.io.profiles[0].positions
            first, later = (
                self._call("decode", Layout(bucket.batch, positions))
                for positions in (catch_up, step)
            )
            self._steps[bucket] = DraftingSteps.make(bucket, first, later)
        return self._steps[bucket]

    def _call(self, profile: str, layout: Layout) -> EngineCall:
        if (profile, layout) not in self._calls:
            call = EngineCall(self.io, self.executor, profile, layout, self.memory)
            self._calls[profile, layout] = call
        return self._calls[profile, layout]


def _within(name: str, wanted: int | None, limit: int) -> int:
    """A limit of use, by default that of the engine."""
    if wanted is None:
        return limit
    if not 1 <= wanted <= limit:
        raise ValueError(
            f"{name} is {wanted}; the engine allows 1 to {limit}: lower it, or build the engine "
            "again for more"
        )
    return wanted
