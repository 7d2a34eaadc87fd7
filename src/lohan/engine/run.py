"""A training run: a model whose state lives on SSD, trained step by step.

    with lohan.open_run(model="path/to/hf", ssd=["/nvme0/run"], host_memory="24GB", learning_rate=1e-5) as run:
        for micro_batches in loader:
            out = run.step(micro_batches)      # out.loss, out.grad_norm, out.tokens, out.seconds
        run.export("out/")

open_run() makes the store from the model the first time and goes on from its last commit afterwards. step() returns
when the step's gradients and norm are known; updates still under way flow into the next step's forward. The plan
is made with the first step, when the size of a micro-batch is known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lohan.engine.compute import Compute, MicroBatch
from lohan.engine.create import build_model, may_clip, num_versions, open_run_store, without_caches
from lohan.engine.devices import Device, VirtualOptions, open_device
from lohan.engine.engine import Engine, StepState
from lohan.engine.export import Progress, export_store
from lohan.engine.layout import UnitLayout
from lohan.engine.memory import (
    OVERHEAD_BYTES,
    Relief,
    bound_allocator,
    old_objects_out_of_sight,
    resident_bytes,
    trim_heap,
)
from lohan.engine.planning import Planned, Planning
from lohan.engine.run_folder import RunFolder
from lohan.engine.settings import Settings
from lohan.engine.swap import open_scratch
from lohan.engine.trace import Span, Step, Trace
from lohan.errors import ConfigError, LohanError
from lohan.models.units import Units
from lohan.optim import LossScale, Updater
from lohan.plan.activations import Activations
from lohan.plan.fit import HostBudget, Wishes, staging_bytes
from lohan.plan.plan import Plan
from lohan.plan.schedule import Key
from lohan.plan.strategies import check_micro_batches, check_strategy
from lohan.profiles import MachineProfile
from lohan.sizes import parse_size
from lohan.store import Arena, Files, Store

# Speculation pays while few steps clip: a step that does is updated twice. Both numbers picked by arithmetic on
# the traffic (a redo costs about one more update), not measured.
_RECENT_STEPS = 20
_MAX_CLIPPED_SHARE = 0.2

_SETTLED_STEPS = 2
"""After so many steps of an engine all that lasts has been made: the second is the first that records its blocks."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step says."""

    step: int
    loss: float
    grad_norm: float | None
    """Of the whole gradient before clipping; None when the step was skipped."""

    skipped: bool
    """A gradient overflowed fp16: nothing was updated and the loss scale was lowered."""

    tokens: int
    seconds: float
    learning_rate: float


class Replanned(NamedTuple):
    """Predicted seconds of a step."""

    before: float
    after: float


class Run:
    """An open run. Made by open_run()."""

    def __init__(
        self,
        *,
        model: nn.Module,
        units: Units,
        layouts: Sequence[UnitLayout],
        updater: Updater,
        store: Store,
        device: Device,
        settings: Settings,
        host_bytes: int,
        commit_every: int,
        wishes: Wishes,
        folder: RunFolder,
        trace: Trace,
        machine: MachineProfile | None = None,
        head_chunks: int | None = None,
    ):
        self.model, self.units, self.layouts, self.store, self.device = model, units, layouts, store, device
        self.settings = settings
        self.plan: Plan | None = None
        trim_heap()  # what loading has left there would be counted twice once the run takes it
        self.base_bytes = resident_bytes()
        """Of the process before the run took any."""
        self._updater, self._host_bytes, self._commit_every = updater, host_bytes, commit_every
        self._wishes, self._trace = wishes, trace
        self.planned: Planned | None = None
        self.planning = Planning(
            model=model, units=units, layouts=layouts, device=device, settings=settings, wishes=wishes,
            host_bytes=host_bytes, machine=machine, head_chunks=head_chunks,
        )  # fmt: skip
        self.folder = folder
        self._schedule = settings.make_schedule()
        self._order = [name for name, _ in model.named_parameters()]
        self._recent: deque[bool] = deque(maxlen=_RECENT_STEPS)
        self._engine: Engine | None = None
        self._owned = ExitStack()
        self._shape: tuple[int, ...] = ()
        self._largest: list[MicroBatch] = []
        """Micro-batches as the plan was made for, without content."""
        self._evaluations = 0
        saved = store.metadata
        self.step_number: int = saved["step"]
        """Steps taken so far; the next one has the next number."""
        self._updates: int = saved["updates"]
        self._lag: dict[str, int] = dict(saved["lag"])
        self._scale = _make_scale(settings, saved.get("loss_scale"))
        self._uncommitted = False
        self._engine_steps = 0

    # -- training -------------------------------------------------------------------------------------

    def step(self, micro_batches: Sequence[MicroBatch], *, metadata: Mapping[str, Any] | None = None) -> StepResult:
        """One optimizer step over all micro-batches. `metadata` is kept with the step if it is committed."""
        started = time.perf_counter()
        self._check_alive()
        check_micro_batches(self._wishes.strategy, len(micro_batches))
        self._trace.begin_step(started)
        engine = self._ready(micro_batches)
        number = self.step_number + 1
        commit = number % self._commit_every == 0
        self._choose_clip(engine)
        rate = self.settings.learning_rate * self._schedule(number)
        state = StepState(
            step=number,
            update_step=self._updates + 1,
            learning_rate=rate,
            max_grad_norm=self.settings.max_grad_norm,
            scale=None if self._scale is None else self._scale.scale,
            lag=self._lag,
            commit=commit,
            undoable=engine.plan.clip == "speculative",
            describe=lambda done: self._describe(done, dict(metadata or {})),
        )
        try:
            with self.device.rng_state_guard():
                ops = engine.scheduler.step(number, commit=commit, micro_batches=len(micro_batches))
                engine.start(state, micro_batches, ops)
                engine.wait(Key(number, "clip"))
            self._settle(engine, state)
        except BaseException as error:
            engine.lanes.fail(error)  # nothing more can be done with this run: it stays at its last commit
            raise
        self.step_number = number
        self._uncommitted = not commit
        engine.prune(number - 1)
        self._engine_steps += 1
        if self._engine_steps == _SETTLED_STEPS:
            self._owned.enter_context(old_objects_out_of_sight())
        norm = None if state.overflow or state.total_norm is None else float(state.total_norm)
        tokens = sum(int(batch["input_ids"].numel()) for batch in micro_batches if "input_ids" in batch)
        ended = time.perf_counter()
        self._trace.end_step(number, started, ended)
        return StepResult(number, _sum(engine.compute.losses), norm, state.overflow, tokens, ended - started, rate)

    def reserve(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Plan for micro-batches as large as these (only the labels' shapes count); smaller ones need no new plan."""
        self._check_alive()
        self._ready(micro_batches)

    def plan_again(self, machine: MachineProfile, *, least_gain: float) -> Replanned | None:
        """Between two steps: the plan for a machine that is not what it was, if it is predicted to pay.

        None where it does not, by `least_gain` of a step, or nothing is planned yet. Any plan gives the same bits.
        """
        self._check_alive()
        self.planning.machine = machine
        if self._engine is None or self.planned is None:
            return None
        planned = self.planning.plan(self._largest)
        before, after = (self.planning.predict(one) for one in (self.planned, planned))
        if before is None or after is None or after >= before * (1 - least_gain):
            return None
        self._close_engine()
        return Replanned(before, after)

    def rest(self) -> None:
        """Write down what is under way and give all memory back until the next step, which needs a plan again."""
        self._check_alive()
        self._close_engine()

    def _settle(self, engine: Engine, state: StepState) -> None:
        """The step's norm is known: keep, redo or drop what was updated on a guess, and count."""
        clip = engine.plan.clip
        if clip == "speculative":
            redo = state.clips and not state.overflow
            engine.put(engine.scheduler.settle(state.step, redo=redo, skip=state.overflow))
        elif state.overflow:
            engine.put(engine.scheduler.skip())
        self._recent.append(state.clips)
        if self._scale is not None:
            self._scale.record(overflow=state.overflow)
        if not state.overflow:
            self._updates += 1
            self._lag = self._lag_after(state)

    def _lag_after(self, state: StepState) -> dict[str, int]:
        lag = dict(self._lag)
        for unit, missing in state.missing.items():
            for index in missing:
                name = self.layouts[unit].spec.params[index].name
                lag[name] = lag.get(name, 0) + 1
        return lag

    def _describe(self, state: StepState, user: dict[str, Any]) -> dict[str, Any]:
        """What a commit of this step says. Called on a lane, once the norm is known."""
        scale = None
        if self._scale is not None:
            after = LossScale.from_dict(self._scale.to_dict())
            after.record(overflow=state.overflow)
            scale = after.to_dict()
        return {
            "step": state.step,
            "updates": self._updates + (0 if state.overflow else 1),
            "lag": dict(self._lag) if state.overflow else self._lag_after(state),
            "loss_scale": scale,
            "run": self.settings.identity(),
            "user": user,
        }

    def _choose_clip(self, engine: Engine) -> None:
        """With clip: auto, guess that a step will not clip while few do."""
        if self._wishes.clip != "auto" or engine.plan.clip == "immediate":
            return
        # A plan that defers has no memory for what a guess goes back to.
        can_undo = self.plan is not None and self.plan.clip == "speculative"
        often = len(self._recent) >= 3 and sum(self._recent) > _MAX_CLIPPED_SHARE * len(self._recent)
        engine.change_clip("speculative" if can_undo and not often else "deferred")

    def _ready(self, micro_batches: Sequence[MicroBatch]) -> Engine:
        """The engine for micro-batches of this size: made with the first step, made again if they grow."""
        if not micro_batches:
            raise ConfigError("A step needs at least one micro-batch.")
        for index, batch in enumerate(micro_batches):
            if "labels" not in batch:
                raise ConfigError(f"Micro-batch {index} has no labels. Pass input_ids, labels and attention_mask.")
        tokens = [int(batch["labels"].numel()) for batch in micro_batches]
        shape = (max(tokens), sum(tokens), len(tokens))
        if self._engine is not None and all(new <= old for new, old in zip(shape, self._shape, strict=True)):
            return self._engine
        self._close_engine()
        planned = self.planning.plan(micro_batches)
        size, plan, budget = planned.size, planned.plan, planned.budget
        gradients = [layout.gradient_record for layout in self.layouts if layout.pieces.state_bytes]
        if plan.gradients_on_ssd and not all(self.store.layout.has(name) for name in gradients):
            raise ConfigError(
                "This run's store was made without room for gradients, and host_memory cannot hold them. "
                "Raise host_memory, or create the run again."
            )
        self.planned, self.plan, self._shape = planned, plan, shape
        self._largest = [{"labels": torch.empty_like(batch["labels"], device="meta")} for batch in micro_batches]
        try:
            arena = Arena(staging_bytes(size, plan))
            self._owned.callback(arena.close)
            self.device.pin(arena.memory)
            self._owned.callback(self.device.unpin, arena.memory)
            compute = Compute(
                self.model, self.units, self.layouts, self.device,
                compute_dtype=self.settings.compute(self.device.name), wire=self.settings.wire, seed=self.settings.seed,
                head_chunks=plan.head_chunks, keep=[plan.keeps(unit) for unit in range(len(self.layouts))],
            )  # fmt: skip
            scratch = self._owned.enter_context(self._open_scratch(plan, len(tokens)))
            self._engine = Engine(
                compute=compute, device=self.device, store=self.store, arena=arena, updater=self._updater,
                layouts=self.layouts, model=size, plan=plan, parameter_order=self._order,
                weight_decay=self.settings.decay, relief=self._relief(budget), scratch=scratch,
            )  # fmt: skip
            self._engine.lanes.spans = self._trace.spans
            self._engine_steps = 0
        except BaseException:
            self._owned.close()
            raise
        return self._engine

    def _open_scratch(self, plan: Plan, micro_batches: int) -> AbstractContextManager[Store | None]:
        units = [unit for unit in range(len(self.layouts)) if "ssd" in plan.tiers(unit)]
        return open_scratch(
            [drive.directory for drive in self.store.drives],
            plan,
            [(unit, micro_batch) for unit in units for micro_batch in range(micro_batches)],
            weights=[float(taken) for taken in self.store.layout.region_bytes],  # as measured when it was made
            observer=self._trace.observe,
        )

    def _relief(self, budget: HostBudget) -> Relief | None:
        """On `cpu` computing shares host memory: what it frees goes back to the system while there is room to go on."""
        if self.device.separate_memory:
            return None
        limit = self.base_bytes + budget.total
        return Relief(limit - OVERHEAD_BYTES, limit - budget.compute // 2)

    def _close_engine(self) -> None:
        """Let go of an engine whose plan no longer fits, with all it knows written down."""
        if self._engine is None:
            return
        try:
            self._settle_all()
        finally:
            engine, self._engine = self._engine, None
            engine.close()
            self._owned.close()

    # -- other uses -----------------------------------------------------------------------------------

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The loss of these micro-batches with the current weights, without dropout. Training's bits are untouched."""
        self._check_alive()
        engine = self._ready(micro_batches)
        self._evaluations += 1
        number = -self._evaluations
        with self.device.rng_state_guard():
            engine.put(engine.scheduler.drain())
            ops = engine.scheduler.evaluate(number, micro_batches=len(micro_batches))
            engine.put(ops, begin=lambda: engine.compute.begin(number, micro_batches, training=False))
            engine.wait(Key(number, "forward", len(self.layouts) - 1, len(micro_batches) - 1))
        return _sum(engine.compute.losses)

    def commit(self, metadata: Mapping[str, Any] | None = None) -> None:
        """Finish all updates and make the last step durable, if it is not yet."""
        self._check_alive()
        if self._engine is not None:
            self._engine.put(self._engine.scheduler.drain())
            self._engine.wait_all()
        if not self._uncommitted:
            return
        if self._engine is not None:
            self._engine.write_residents()
        state = {
            "step": self.step_number,
            "updates": self._updates,
            "lag": self._lag,
            "loss_scale": None if self._scale is None else self._scale.to_dict(),
            "run": self.settings.identity(),
            "user": dict(metadata or {}),
        }
        self.store.commit(self.step_number, state).wait()
        self._uncommitted = False

    def export(
        self,
        out: str | Path,
        dtype: str | torch.dtype | None = None,
        *,
        master: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Finish all updates, commit, and write the weights as a Hugging Face folder that appears when complete.

        Weights keep the dtype they are trained in unless `dtype` asks for another; `master` gives the fp32 masters.
        """
        self.commit()
        export_store(self.store, self.folder, Path(out), dtype=dtype, master=master, progress=progress)

    @property
    def busy_seconds(self) -> dict[str, float]:
        """What computing and updating have taken by themselves, without waiting."""
        return dict(self._engine.busy_seconds) if self._engine is not None else {}

    def drain(self) -> None:
        """Wait until all updates of the last step are done and written."""
        self._settle_all()

    @property
    def ssd_bytes(self) -> int:
        """Bytes read from and written to the drives since the run was opened."""
        return sum(self._trace.bytes_moved.values())

    def drive_requests(self, since: float) -> list[Span]:
        """What the drives were asked for and had done after this moment of perf_counter()."""
        return self._trace.requests(since)

    def step_spans(self, *, back: int = 0) -> tuple[Step, list[Span]] | None:
        """When the last step was taken (or one before it), and what lanes and drives did meanwhile."""
        return self._trace.last_step(back=back)

    @property
    def clip(self) -> str | None:
        """When updates run that may be clipped, as of the last step; None before the first plan."""
        return None if self._engine is None else self._engine.plan.clip

    @property
    def ssd_written_bytes(self) -> int:
        """Bytes written to the drives since the run was opened."""
        return self._trace.bytes_moved["write"]

    def write_trace(self, path: str | Path, *, steps: int = 1) -> None:
        """The last steps as a file for https://ui.perfetto.dev: what every lane and every drive did when."""
        self._trace.write(Path(path), steps=steps, until=time.perf_counter())

    def read_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's wire weight, one after another, as of the last commit or step."""
        self._settle_all()
        for layout in self.layouts:
            buffer = torch.empty(layout.pieces.weights_bytes, dtype=torch.uint8)
            if buffer.numel():
                self.store.read_group(layout.weights_group, buffer.numpy()).wait()
            for index, param in enumerate(layout.spec.params):
                yield param.name, layout.tensor(buffer, index).clone()

    def read_state(self) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """Every trained parameter's fp32 master and moments, one after another. For tests and curious people."""
        self._settle_all()
        for layout in self.layouts:
            found: dict[int, list[tuple[Tensor, dict[str, Tensor]]]] = {}
            for index, piece in enumerate(layout.pieces.pieces):
                if not piece.state_bytes:
                    continue
                state = torch.empty(piece.state_bytes, dtype=torch.uint8)
                weights = torch.empty(piece.weights_bytes, dtype=torch.uint8)
                self.store.read(layout.state_record(index), state.numpy()).wait()
                self.store.read(layout.weights_record(index), weights.numpy()).wait()
                for chunk in piece.chunks:
                    start = chunk.weights_offset - piece.weights_offset
                    size = chunk.num_elements * layout.wire.itemsize
                    wire = weights[start : start + size].view(layout.wire)
                    part = state[
                        chunk.state_offset : chunk.state_offset + self._updater.state_bytes(chunk.num_elements)
                    ]
                    master = torch.empty(chunk.num_elements)
                    self._updater.read_master(wire, part, master)
                    moments = self._updater.read_moments(wire, part)
                    found.setdefault(chunk.tensor, []).append((master, moments))
            for tensor, parts in found.items():
                param = layout.spec.params[tensor]
                master = torch.cat([one for one, _ in parts]).view(param.shape)
                names = parts[0][1]
                moments = {name: torch.cat([m[name] for _, m in parts]).view(param.shape) for name in names}
                yield param.name, master, moments

    def _check_alive(self) -> None:
        failure = None if self._engine is None else self._engine.lanes.failure
        if failure is not None:
            raise LohanError(
                f"This run stopped after step {self.step_number}, by {type(failure).__name__}: {failure}\n"
                f"Open it again: it goes on from step {self.store.committed_step}, its last commit."
            ) from failure

    def _settle_all(self) -> None:
        self._check_alive()
        if self._engine is not None:
            self._engine.put(self._engine.scheduler.drain())
            self._engine.wait_all()
            if self._uncommitted:
                self._engine.write_residents()

    def close(self, *, commit: bool = True) -> None:
        """Finish the updates under way and, unless the run has failed, commit its last step."""
        failed = self._engine is not None and self._engine.lanes.failure is not None
        try:
            if commit and not failed:
                self.commit()
        finally:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
            self._owned.close()
            self._trace.close(time.perf_counter())


def _sum(losses: Sequence[float]) -> float:
    total = 0.0
    for loss in losses:  # not sum(): from Python 3.12 on that is another rounding
        total += loss
    return total


def _make_scale(settings: Settings, saved: dict[str, Any] | None) -> LossScale | None:
    wanted = settings.loss_scale
    if wanted is None and settings.wire == torch.float16:
        wanted = "dynamic"
    if wanted is None:
        return None
    if saved is not None:
        return LossScale.from_dict(saved)
    if isinstance(wanted, str):
        if wanted != "dynamic":
            raise ConfigError(f'loss_scale is {wanted!r}. Write a number, or "dynamic".')
        return LossScale()
    return LossScale.static(float(wanted))


@contextmanager
def open_run(
    *,
    model: str | Path | nn.Module | None = None,
    ssd: str | Path | Sequence[str | Path],
    host_memory: str | int,
    gpu_memory: str | int | None = None,
    device: str = "auto",
    blocks: str | None = None,
    commit_every: int = 1,
    versions: int | None = None,
    clip: str = "auto",
    strategy: str = "lohan",
    left_units: int = 0,
    activations: Activations | None = None,
    head_chunks: int | None = None,
    machine: MachineProfile | None = None,
    weights: Sequence[float] | None = None,
    virtual: VirtualOptions | None = None,
    keep_nothing_in_memory: bool = False,
    piece_elements: int | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int], None] | None = None,
    trace: str | Path | None = None,
    store_files: Files | None = None,
    **settings: Any,
) -> Iterator[Run]:
    """Open a run on these SSD directories: a new one from `model`, or the one that is there.

    A run keeps what it needs of its model's folder, so going on with one does not need `model`. With `trace`, every
    step writes a file for https://ui.perfetto.dev into that folder; the last 20 are kept.

    With the machine's profile (`machine`) the planner decides which activations are kept, sent away or computed again,
    what stays in memory and which updates are left; `activations` sets the first by hand, `head_chunks` in how many
    parts the head's loss is computed. `strategy` is lohan, or for comparison lohan-paper, lohan-paper-naive,
    separate-stage or in-memory: all give the same bits.

    The other arguments are fields of Settings: learning_rate, max_grad_norm, state_format and so on. On leaving, the
    last step is committed; after an error the run stays at its last commit. `store_files` is for tests: what the store
    stands on instead of the system's file calls.
    """
    chosen = Settings(**settings)
    directories = [Path(ssd)] if isinstance(ssd, (str, Path)) else [Path(d) for d in ssd]
    host_bytes = parse_size(host_memory, name="host_memory")
    gpu_bytes = None if gpu_memory is None else parse_size(gpu_memory, name="gpu_memory")
    check_strategy(strategy)
    if commit_every < 1:
        raise ConfigError(f"commit_every is {commit_every}; 1 commits every step, 10 every tenth.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    needs_clip = may_clip(chosen)
    if clip not in ("auto", "deferred", "speculative"):
        raise ConfigError(f"clip is {clip!r}. Write auto, deferred or speculative.")
    if versions is None:
        versions = num_versions(chosen, clip=clip, commit_every=commit_every)
    wishes = Wishes(
        separate_memory=device != "cpu", clip=clip if needs_clip else "none", versions=versions,
        commit_every=commit_every, strategy=strategy, left_units=left_units, keep_nothing=keep_nothing_in_memory,
        activations=activations or Activations(),
    )  # fmt: skip
    recorded = Trace(None if trace is None else Path(trace))
    bound_allocator()
    with ExitStack() as owned:
        opened = owned.enter_context(open_device(device, memory_bytes=gpu_bytes, options=virtual))
        built = build_model(
            model, chosen, directories, device=opened.name, blocks=blocks, piece_elements=piece_elements,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        if not any(layout.pieces.state_bytes for layout in built.layouts):
            raise ConfigError(
                f"frozen is {chosen.frozen!r} and nothing is left to train. Let it match fewer parameters."
            )
        store, folder = owned.enter_context(
            open_run_store(
                directories,
                built,
                chosen,
                versions=versions,
                gradients=needs_clip or strategy == "separate-stage" or left_units > 0,
                weights=weights,
                progress=progress,
                observer=recorded.observe,
                files=store_files,
            )
        )
        owned.enter_context(without_caches(built.module))
        run = Run(
            model=built.module, units=built.units, layouts=built.layouts, updater=built.updater, store=store,
            device=opened, settings=chosen, host_bytes=host_bytes, commit_every=commit_every, wishes=wishes,
            folder=folder, trace=recorded, machine=machine, head_chunks=head_chunks,
        )  # fmt: skip
        try:
            yield run
        except BaseException:
            run.close(commit=False)
            raise
        run.close()
