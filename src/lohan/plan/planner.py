"""From a model, a machine and budgets to the Plan with the least predicted seconds per token.

The closed form (stage_work.py) sorts out a handful of plans, the simulator's event loop decides between them: the same
Schedule the engine runs, on a virtual clock. Large models are simulated with their micro-batches in a few groups, which
changes a step by less than a percent. With tokens per step free, the smallest number that comes within 3 % of the best
rate up to the maximum is taken.

Ties go to what was found first, and nothing here is random: identical inputs give identical plans. Pure: no torch, no
files, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lohan.errors import ConfigError
from lohan.plan.candidates import Candidate, Case, DeviceBytes, Finder
from lohan.plan.infeasible import refuse
from lohan.plan.memory import Budgets, budgets_of, device_use, host_budget_of, host_use, ssd_use
from lohan.plan.predict import predict
from lohan.plan.result import PlanResult, Request, SizeFactory
from lohan.profiles import MachineProfile, ModelProfile
from lohan.sim.sizes import size_model
from lohan.sim.strategies import scale_batch
from lohan.sim.timeline import Timeline

MAX_TOKENS_PER_STEP = 524_288
NEARLY_BEST = 0.97
"""Of the best rate, what the chosen number of tokens per step must reach."""

MICRO_BATCH_TOKENS = 4096
"""Micro-batches have at least as many tokens where they fit: the FLOP/s of a profile are those of large matmuls. The
published runs had 16,384 and more; not measured below."""

STATE_BYTES_PER_PARAMETER = 10.0
"""Of the split master with AdamW, the default with bf16 weights."""

_DETAILED = 160
"""Units times micro-batches and pieces up to which every micro-batch is simulated by itself, and more plans are."""

_MAX_PIECES = 4
"""Of a unit's state, as simulated. 8 changes the step of 13B and of 175B by less than half a percent."""

_MANY, _FEW, _QUICK = 60, 6, 3
"""Candidates simulated: of a model that is simulated in detail, of a larger one, and while tokens are chosen."""

_DEEP = 60
"""Units above which a third fewer are: 175B has 98 and shall be planned in two seconds."""


def make_plan(
    profile: ModelProfile,
    machine: MachineProfile,
    budgets: Budgets | None = None,
    *,
    tokens_per_step: int | None = None,
    micro_batch_size: int | None = None,
    max_tokens_per_step: int = MAX_TOKENS_PER_STEP,
    clip: str = "auto",
    versions: int = 2,
    commit_every: int = 1,
    state_bytes_per_parameter: float = STATE_BYTES_PER_PARAMETER,
    wire_bytes: int = 2,
    sizes: SizeFactory | None = None,
    head_chunks: int | None = None,
    spills: bool = True,
    device_bytes: DeviceBytes | None = None,
    keep_nothing: bool = False,
) -> PlanResult:
    """The plan with the least seconds per token, or PlanInfeasible with what would fit.

    `profile` is of one sequence (or of any micro-batch whose multiples are wanted); its sequence length is taken.
    Without `tokens_per_step` it is chosen. `clip` is none, auto, deferred or speculative. `sizes`, `device_bytes` and
    `budgets.host` are for those who know the model's pieces and memory better than its profile does: the engine. With
    `keep_nothing` no unit stays in memory, however much is free.
    """
    request = Request(
        profile=profile, machine=machine, budgets=budgets or budgets_of(machine), tokens_per_step=tokens_per_step,
        micro_batch_size=micro_batch_size, max_tokens_per_step=max_tokens_per_step, clip=clip, versions=versions,
        commit_every=commit_every, state_bytes_per_parameter=state_bytes_per_parameter, wire_bytes=wire_bytes,
        sizes=sizes, head_chunks=head_chunks, spills=spills, device_bytes=device_bytes,
        keep_nothing=keep_nothing,
    )  # fmt: skip
    return plan_for(request)


def plan_for(request: Request) -> PlanResult:
    """make_plan for what is already a Request."""
    _check(request)
    search = _Search(request)
    if request.tokens_per_step is not None:
        return search.at(search.sequences_of(request.tokens_per_step))
    return search.choose()


def _check(request: Request) -> None:
    if request.clip not in ("none", "auto", "deferred", "speculative"):
        raise ConfigError(f"clip is {request.clip!r}. Write none, auto, deferred or speculative.")
    if request.clip == "speculative" and not _can_undo(request):
        raise ConfigError(
            f"clip: speculative needs versions: 3 when only every {request.commit_every}th step is committed."
        )
    size = request.micro_batch_size
    if size is not None and (size < 1 or size % request.profile.micro_batch_size):
        raise ConfigError(
            f"micro_batch_size is {size}; it must be a multiple of {request.profile.micro_batch_size}, as profiled."
        )


def _can_undo(request: Request) -> bool:
    return request.versions >= 3 or (request.versions == 2 and request.commit_every == 1)


@dataclass(frozen=True, slots=True)
class _Found:
    finder: Finder
    candidate: Candidate
    timeline: Timeline
    seconds: float

    @property
    def case(self) -> Case:
        return self.finder.case


class _Search:
    """One call's search; remembers what it has found."""

    def __init__(self, request: Request):
        self._request = request
        self._known: dict[tuple[int, bool], _Found | None] = {}
        self._profiles: dict[int, ModelProfile] = {}

    @property
    def _per_sequence(self) -> int:
        """Tokens of one sequence on every device."""
        return self._request.profile.sequence_length * self._request.machine.gpus

    def sequences_of(self, tokens: int) -> int:
        """Sequences on each device."""
        each = self._per_sequence
        if tokens < each or tokens % each:
            nearest = max(1, round(tokens / each)) * each
            raise ConfigError(
                f"tokens_per_step is {tokens}; it must be a multiple of {each} "
                f"(sequence length x GPUs). The nearest is {nearest}."
            )
        return tokens // each

    def at(self, sequences: int, notes: tuple[str, ...] = ()) -> PlanResult:
        """The plan at this many sequences on each device."""
        found = self._find(sequences)
        if found is None:
            raise refuse(self._request, lambda case: Finder(case).short, self._cases)
        return self._result(found, notes)

    def choose(self) -> PlanResult:
        """At the smallest number of tokens that is nearly best."""
        steps = _steps(max(1, self._request.max_tokens_per_step // self._per_sequence))
        size = self._request.micro_batch_size
        if size is not None:
            steps = [step for step in steps if step % size == 0] or [size]
        high = len(steps) - 1
        # The device may not hold all that lies between blocks.
        while high >= 0 and self._find(steps[high], quick=True) is None:
            high -= 1
        if high < 0:
            raise refuse(self._request, lambda case: Finder(case).short, self._cases)
        best = self._rate(steps[high])
        if high >= 3:  # more tokens are not always better: what waits for backward takes RAM
            best = max(best, self._rate(steps[high - 3]))
        low, top = 0, high
        while low < top:
            middle = (low + top) // 2
            if self._rate(steps[middle]) >= NEARLY_BEST * best:
                top = middle
            else:
                low = middle + 1
        tokens, largest = steps[low] * self._per_sequence, steps[high] * self._per_sequence
        note = (
            f"{tokens:,} tokens per step were chosen: the fewest within {1 - NEARLY_BEST:.0%} of the best rate "
            f"up to {largest:,}, which is {best:.4g} tokens/s"
        )
        return self.at(steps[low], (note,))

    def _rate(self, sequences: int) -> float:
        found = self._find(sequences, quick=True)
        return 0.0 if found is None else sequences * self._per_sequence / found.seconds

    def _find(self, sequences: int, *, quick: bool = False) -> _Found | None:
        if (sequences, quick) not in self._known:
            self._known[sequences, quick] = self._search(sequences, quick)
        return self._known[sequences, quick]

    def _search(self, sequences: int, quick: bool) -> _Found | None:
        """Of every size of micro-batch that fits, the largest wanted one, or a smaller one that is clearly faster."""
        best: _Found | None = None
        tried = 0
        for size in self._sizes(sequences):
            found = self._best_of(self._cases(sequences, size), quick)
            if found is None:
                continue
            tried += 1
            if best is None or found.seconds < best.seconds * 0.99:
                best = found
            if tried == (2 if self._detailed(best.case) and not quick else 1):
                break
        return best

    def _sizes(self, sequences: int) -> list[int]:
        """Sizes of micro-batches to try: from the smallest that is large enough down."""
        request = self._request
        if request.micro_batch_size is not None:
            if sequences % request.micro_batch_size:
                raise ConfigError(
                    f"{sequences} sequences per step and GPU are no multiple of micro_batch_size "
                    f"{request.micro_batch_size}."
                )
            return [request.micro_batch_size]
        base = request.profile.micro_batch_size
        divisors = [size for size in range(base, sequences + 1, base) if sequences % size == 0]
        if not divisors:
            raise ConfigError(f"{sequences} sequences per step and GPU are no multiple of {base}, as profiled.")
        enough = [size for size in divisors if size * request.profile.sequence_length >= MICRO_BATCH_TOKENS]
        first = enough[0] if enough else divisors[-1]
        return [size for size in reversed(divisors) if size <= first]

    def _cases(self, sequences: int, size: int) -> list[Case]:
        request = self._request
        profile = self._profile(size)
        count = sequences // size
        if request.sizes is not None:
            model = request.sizes(profile, count)
        else:
            model = size_model(
                profile, num_micro_batches=count, wire_bytes=request.wire_bytes,
                state_bytes_per_parameter=request.state_bytes_per_parameter, max_pieces=_MAX_PIECES,
            )  # fmt: skip
        modes = {"none": ("immediate",), "deferred": ("deferred",), "speculative": ("speculative",)}.get(
            request.clip, ("speculative", "deferred") if _can_undo(request) else ("deferred",)
        )
        return [
            Case(
                profile=profile, model=model, machine=request.machine, budgets=request.budgets, micro_batches=count,
                clip=mode, versions=request.versions, commit_every=request.commit_every,
                wire_bytes=request.wire_bytes, head_chunks=request.head_chunks, spills=request.spills,
                device_bytes=request.device_bytes, keep_nothing=request.keep_nothing,
            )
            for mode in modes
        ]  # fmt: skip

    def _profile(self, size: int) -> ModelProfile:
        if size not in self._profiles:
            times = size // self._request.profile.micro_batch_size
            self._profiles[size] = scale_batch(self._request.profile, times)
        return self._profiles[size]

    def _detailed(self, case: Case) -> bool:
        return len(case.model.units) * (case.micro_batches + _MAX_PIECES) <= _DETAILED

    def _best_of(self, cases: Sequence[Case], quick: bool) -> _Found | None:
        """The fastest of the most promising plans for all of these cases (ways to clip)."""
        finders = [Finder(case) for case in cases]
        limit = _QUICK if quick else _MANY if self._detailed(cases[0]) else _FEW
        limit = limit * 2 // 3 if len(cases[0].model.units) > _DEEP else limit
        thorough = limit == _MANY
        candidates = [(finder, one) for finder in finders for one in finder.best(limit, thorough=thorough)]
        best: _Found | None = None
        for finder, candidate in sorted(candidates, key=lambda pair: pair[1].rank)[:limit]:
            best = self._better(finder, candidate, best)
        return best if best is None or quick else self._refine(best)

    def _refine(self, best: _Found) -> _Found:
        """More or fewer operators kept, while that helps."""
        for by in (4, -4, 2, -2, 1, -1) if self._detailed(best.case) else (2, -2):
            beside = best.finder.beside(best.candidate, by)
            if beside is not None:
                best = self._better(best.finder, beside, best)
        return best

    def _better(self, finder: Finder, candidate: Candidate, best: _Found | None) -> _Found:
        # No simulated step is shorter than its busiest resource.
        if best is not None and candidate.flowing_seconds >= best.seconds * (1 - 1e-9):
            return best
        detailed = self._detailed(finder.case)
        timeline = predict(finder.case, candidate.plan, detailed=detailed, steps=3 if detailed else 2)
        # Two or three steps can end with writes still waiting; in the long run nothing works more than all the time.
        seconds = max(timeline.seconds_per_step, candidate.flowing_seconds)
        if best is not None and seconds >= best.seconds * (1 - 1e-9):
            return best
        return _Found(finder, candidate, timeline, seconds)

    def _result(self, found: _Found, notes: tuple[str, ...]) -> PlanResult:
        case, plan, timeline = found.case, found.candidate.plan, found.timeline
        budget = host_budget_of(case.profile, plan, case.budgets, wire_bytes=case.wire_bytes)
        lanes = timeline.busy_seconds() | {"ssd": timeline.drive_seconds()}
        return PlanResult(
            plan=plan,
            model=case.model,
            profile=case.profile,
            machine=case.machine,
            budgets=case.budgets,
            num_micro_batches=case.micro_batches,
            tokens_per_step=case.profile.tokens * case.micro_batches * case.machine.gpus,
            seconds_per_step=found.seconds,
            lanes=lanes,
            bytes_per_step=timeline.bytes_per_step(),
            bottleneck=timeline.bottleneck,
            gpu_parts=device_use(case.profile, plan, case.micro_batches, wire_bytes=case.wire_bytes),
            host_parts=host_use(case.model, plan, budget, case.micro_batches),
            ssd_parts=ssd_use(case.model, plan, case.micro_batches * case.machine.gpus, versions=case.versions)
            if case.machine.drives
            else {},
            notes=(*notes, *case.profile.notes),
            request=self._request,
        )


def _steps(most: int) -> list[int]:
    """Numbers of sequences to choose from: 1, 2, 3, 4, 6, 8, 12, ... up to the most."""
    steps = {number for power in range(most.bit_length()) for number in (1 << power, 3 << power >> 1)}
    return sorted(step for step in steps if 1 <= step <= most)
