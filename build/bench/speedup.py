"""Speed, Tok./Iter and acceptance of every draft mode beside Hugging Face, and equality with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...engines.adaptor import Adaptor
from ...engines.decoder import Decoder
from ...engines.draft import TorchDraft
from ...engines.pair import DTYPES, DraftMode, Pair, load_adaptor, quantize
from ...engines.sequence import GenerationRequest
from ...engines.speculative import LoopSettings
from ...engines.target import TorchTarget
from ...plugins.slot_attention.rule import MemoryRule
from .generation import Overhead, Run, measure_overhead, run_hf, run_loop
from .record import Check, Record, Tick, median, new_card, rounded, shown
from .texts import Prompt, check_length

HF, ASSISTED = "hf-generate", "hf-assisted"
WINDOW_EQUAL = "window-equal"  # a window with as many entries as the slots mode has
MODES = (*(str(mode) for mode in DraftMode), WINDOW_EQUAL)
HOST_LIMIT_MS = 0.3  # per iteration
OVERHEAD_LIMIT = 1.01  # plain decoding by the loop / by the target alone


@dataclass(frozen=True)
class SpeedSettings:
    """What is measured. Lengths in tokens; every prompt runs through all systems in turn."""

    prefixes: tuple[int, ...] = (2048, 4096)
    new_tokens: int = 64
    prompts: int = 3
    draft_tokens: int = 5
    modes: tuple[str, ...] = MODES
    pairs: int = 7

    def __post_init__(self):
        for name in ("prompts", "draft_tokens", "pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not self.prefixes or min(self.prefixes) < 1:
            raise ValueError(f"prefixes is {self.prefixes}; give one or more numbers from 1 up")
        if self.new_tokens < 2:
            raise ValueError(f"new_tokens is {self.new_tokens}; a rate needs 2 or more")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise ValueError(f"modes is {self.modes}; choose from {', '.join(MODES)}")

    def check_pair(self, pair: Pair) -> None:
        """Raises ValueError for lengths beyond those of a pair."""
        check_length(max(self.prefixes), self.new_tokens, pair)
        if self.draft_tokens > pair.max_draft_tokens:
            raise ValueError(
                f"draft_tokens is {self.draft_tokens}; the pair's max_draft_tokens is "
                f"{pair.max_draft_tokens}"
            )


@dataclass(frozen=True)
class Bench:
    """A pair's decoders and adaptor, and the same two models in Hugging Face's own code."""

    pair: Pair
    target: Decoder
    draft: Decoder
    adaptor: Adaptor | None
    hf: PreTrainedModel
    assistant: PreTrainedModel

    @classmethod
    def load(cls, directory: Path, quantization: str | None = None) -> Bench:
        """Loads a prepared pair; all four models separately.

        quantization: of the draft, None: the pair's own.
        """
        pair = Pair.load(directory)
        pair = replace(pair, draft_quantization=quantization or pair.draft_quantization)
        dtype = DTYPES[pair.dtype]
        target, draft = (Decoder.load(directory / role, dtype) for role in ("target", "draft"))
        adaptor = load_adaptor(directory, draft, pair.memory)
        hf, assistant = (
            AutoModelForCausalLM.from_pretrained(directory / role, dtype=dtype).eval()
            for role in ("target", "draft")
        )
        draft = quantize(draft, pair.draft_quantization)
        return cls(pair, target, draft, adaptor, hf, assistant)

    def rule(self, mode: str, length: int) -> MemoryRule | None:
        """The draft's memory rule in a mode for sequences of up to `length` tokens."""
        if mode == WINDOW_EQUAL:
            window = self.pair.memory.window + self.pair.memory.slots(length)
            return self.pair.rule(DraftMode.WINDOW, window)
        return self.pair.rule(DraftMode(mode))

    def new_target(self) -> TorchTarget:
        """A target with one empty cache."""
        pair = self.pair
        return TorchTarget(
            self.target,
            max_sequences=1,
            max_length=pair.max_length,
            max_draft_tokens=pair.max_draft_tokens,
            chunk=pair.chunk,
        )

    def new_draft(self, rule: MemoryRule | None) -> TorchDraft | None:
        """A draft with one empty memory; None without a rule."""
        pair = self.pair
        if rule is None:
            return None
        return TorchDraft(
            self.draft,
            rule,
            self.adaptor if rule.interval else None,
            max_sequences=1,
            max_length=pair.max_length,
            max_draft_tokens=pair.max_draft_tokens,
            chunk=pair.chunk,
        )

    def settings(self, rule: MemoryRule | None) -> LoopSettings:
        """The loop's settings as a server has them."""
        return self.pair.loop_settings(DraftMode.NONE, rule=rule)

    def request(self, ids: tuple[int, ...], settings: SpeedSettings) -> GenerationRequest:
        """A greedy request that ends at the model's own end ids."""
        return GenerationRequest(
            ids,
            settings.new_tokens,
            draft_tokens=settings.draft_tokens,
            end_ids=self.target.config.eos_ids,
        )

    def run(self, mode: str, request: GenerationRequest) -> Run:
        """One generation in a mode, with engines that hold nothing yet."""
        rule = self.rule(mode, len(request.ids) + request.max_tokens)
        return run_loop(self.new_target(), self.new_draft(rule), self.settings(rule), request)

    def systems(self, settings: SpeedSettings) -> dict[str, Callable[[GenerationRequest], Run]]:
        """Every system that is compared, by name."""
        gamma = settings.draft_tokens
        found = {
            HF: lambda request: run_hf(self.hf, request),
            ASSISTED: lambda request: run_hf(self.hf, request, self.assistant, gamma),
        }
        return found | {mode: _Mode(self, mode) for mode in settings.modes}


@dataclass(frozen=True)
class _Mode:
    bench: Bench
    name: str

    def __call__(self, request: GenerationRequest) -> Run:
        return self.bench.run(self.name, request)


@dataclass(frozen=True)
class SpeedRow:
    """One system at one prefix; medians over the prompts.

    tok_s: decode rate, the prompt's time excluded. first_s: seconds to the first tokens (mode none
    answers in chunks). vs_hf, vs_none: median of the prompts' ratios of tok_s to Hugging Face's
    generate and to mode none. total_vs_hf: the same of whole times, prompt included. Tok./Iter
    counts the target's own token, acceptance does not. equal: all outputs are those of generate.
    """

    system: str
    prefix: int
    prefix_tokens: float
    new_tokens: int
    tok_s: float | None
    tok_per_iter: float
    acceptance: float | None
    vs_hf: float | None
    vs_none: float | None
    total_vs_hf: float | None
    first_s: float
    total_s: float
    host_ms: float | None
    entries: int | None
    equal: bool


def measure_speed(
    bench: Bench, prompts: dict[int, list[Prompt]], settings: SpeedSettings, tick: Tick
) -> list[SpeedRow]:
    """Runs every prompt of every prefix length through all systems, in rotating order."""
    systems, rows = bench.systems(settings), []
    _warm_up(bench, systems, next(iter(prompts.values()))[0])
    for prefix, group in prompts.items():
        runs: dict[str, list[Run]] = {name: [] for name in systems}
        for number, prompt in enumerate(group):
            for name in rotated(list(systems), number):
                tick(f"{prefix:,} tokens, {prompt.name}: {name}")
                runs[name].append(systems[name](bench.request(prompt.ids, settings)))
        sizes = [len(prompt.ids) for prompt in group]
        rows += [_row(bench, name, prefix, sizes, runs, settings) for name in systems]
    return rows


def ticks(settings: SpeedSettings) -> int:
    """How often `measure_speed` ticks."""
    return len(settings.prefixes) * settings.prompts * (len(settings.modes) + 2)


def rotated(names: list[str], number: int) -> list[str]:
    """The names starting at another one for every number."""
    start = number % len(names)
    return names[start:] + names[:start]


def _warm_up(bench: Bench, systems: dict[str, Callable], prompt: Prompt) -> None:
    request = GenerationRequest(prompt.ids[:64], 4, end_ids=bench.target.config.eos_ids)
    for run in systems.values():
        run(request)


def _row(
    bench: Bench,
    name: str,
    prefix: int,
    sizes: Sequence[int],
    runs: dict[str, list[Run]],
    settings: SpeedSettings,
) -> SpeedRow:
    mine, plain = runs[name], runs.get(str(DraftMode.NONE), [])
    drafted = sum(run.drafted or 0 for run in mine)
    rule = bench.rule(name, prefix + settings.new_tokens) if name in MODES else None
    return SpeedRow(
        system=name,
        prefix=prefix,
        prefix_tokens=median(sizes),
        new_tokens=sum(len(run.ids) for run in mine),
        tok_s=rounded(median([run.tok_s for run in mine if run.tok_s])),
        tok_per_iter=rounded(
            sum(len(run.ids) for run in mine) / sum(run.iterations for run in mine)
        ),
        acceptance=rounded(sum(run.accepted or 0 for run in mine) / drafted) if drafted else None,
        vs_hf=_ratio(mine, runs[HF]),
        vs_none=_ratio(mine, plain),
        total_vs_hf=rounded(
            median([b.total_s / a.total_s for a, b in zip(mine, runs[HF], strict=True)])
        ),
        first_s=rounded(median([run.first_s for run in mine])),
        total_s=rounded(median([run.total_s for run in mine])),
        host_ms=rounded(median([ms for run in mine for ms in run.host_ms])),
        entries=rule.extent(prefix) if rule else None,
        equal=[run.ids for run in mine] == [run.ids for run in runs[HF]],
    )


def _ratio(mine: Sequence[Run], other: Sequence[Run]) -> float | None:
    """Median of the decode rates' ratios, prompt by prompt."""
    pairs = zip(mine, other, strict=False)
    return rounded(median([a.tok_s / b.tok_s for a, b in pairs if a.tok_s and b.tok_s]))


def measure_plain(bench: Bench, prompt: Prompt, settings: SpeedSettings, tick: Tick) -> Overhead:
    """The cost of the loop where it does not speculate."""
    tick(f"plain decoding, {settings.pairs} pairs")
    request = replace(bench.request(prompt.ids, settings), draft_tokens=0, end_ids=())
    loop = replace(bench.settings(None), target_chunk=0)  # the prompt is in the cache
    return measure_overhead(bench.new_target(), loop, request, settings.pairs)


def speed_record(
    rows: Sequence[SpeedRow], overhead: Overhead, settings: SpeedSettings, common: dict
) -> Record:
    """Rows, the loop's overhead, and the limits on host work."""
    host = [row.host_ms for row in rows if row.host_ms is not None and row.system != "none"]
    checks = (
        Check("host ms per iteration, worst mode's median", max(host, default=None), HOST_LIMIT_MS),
        Check("plain decoding: loop / target alone", overhead.ratio, OVERHEAD_LIMIT),
    )
    ratios = {
        "plain_overhead": asdict(overhead),
        "equal": all(row.equal for row in rows),
        "vs_hf": {f"{row.system}@{row.prefix}": row.vs_hf for row in rows},
    }
    return Record(
        "speedup", common | {"batch": 1, "greedy": True} | asdict(settings), rows, ratios, checks
    )


def speed_card(record: Record) -> Table:
    """The main numbers, Hugging Face first."""
    card = new_card(
        f"greedy, {record.settings['dtype']}, batch 1, draft length "
        f"{record.settings['draft_tokens']}, draft quantisation "
        f"{record.settings['draft_quantization']}",
        (
            "system",
            "prefix",
            "tok/s",
            "/hf",
            "/none",
            "Tok/Iter",
            "accepted",
            "host ms",
            "equal",
        ),
    )
    for row in record.rows:
        card.add_row(
            row.system,
            f"{row.prefix:,}",
            shown(row.tok_s, ".1f"),
            shown(row.vs_hf),
            shown(row.vs_none),
            shown(row.tok_per_iter),
            shown(row.acceptance, ".0%"),
            shown(row.host_ms),
            "yes" if row.equal else "NO",
        )
    return card
