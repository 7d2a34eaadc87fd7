"""The engine: walks a Schedule over the lanes, of which the caller's thread is one: the one that computes.

Every kind of operation has one method here that does it and nothing more. What happens when, and what waits for
what, stands in the Schedule; how much memory each purpose has, in the Plan. The engine never weighs two options.

On a `cpu` device computing and updating share the cores, so the thread that computes does the updates too, with the
helpers that its operators have woken already. An update that can run goes first: it ends a piece's stay in memory, and
the drives can go on with the next. While that thread is elsewhere, between two steps, the lane's own thread updates.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lohan.engine.compute import Compute, MicroBatch
from lohan.engine.cores import copy_bytes
from lohan.engine.devices.base import Device
from lohan.engine.lanes import Lanes, Task
from lohan.engine.layout import UnitLayout
from lohan.engine.memory import Relief
from lohan.engine.pools import HostBuffer, Pool
from lohan.engine.swap import Swapper
from lohan.errors import NonFinite
from lohan.optim.clipping import GradNorm
from lohan.optim.update import Updater
from lohan.plan.plan import ModelSize, Plan
from lohan.plan.schedule import LANES, Key, Op, Scheduler
from lohan.store import Arena, Handle, Store, round_up


@dataclass(slots=True)
class StepState:
    """What one step's operations share."""

    step: int
    update_step: int
    """How often the optimizer has stepped, this one included; skipped steps do not count."""

    learning_rate: float
    max_grad_norm: float | None
    scale: float | None
    lag: dict[str, int]
    """Updates each parameter has missed because it had no gradient; the optimizer does not count those."""

    commit: bool = False
    undoable: bool = False
    """Updated on a guess: there must be a way back."""

    describe: Callable[[StepState], dict[str, Any]] | None = None
    """What a commit of this step says, asked once its norm is known."""

    metadata: dict[str, Any] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    missing: dict[int, frozenset[int]] = field(default_factory=dict)
    """Tensors without a gradient, by unit."""

    overflow: bool = False
    total_norm: Tensor | None = None
    coefficient: Tensor | None = None
    """None until the norm is known; an update that runs before takes it as 1."""

    @property
    def clips(self) -> bool:
        """Whether the norm changes the update."""
        return self.coefficient is not None and bool(self.coefficient < 1)


class Engine:
    """Everything that runs a step. Opened by `open_run`, closed in reverse."""

    def __init__(
        self,
        *,
        compute: Compute,
        device: Device,
        store: Store,
        arena: Arena,
        updater: Updater,
        layouts: Sequence[UnitLayout],
        model: ModelSize,
        plan: Plan,
        parameter_order: Sequence[str],
        weight_decay: Callable[[str, tuple[int, ...]], float],
        relief: Relief | None = None,
        scratch: Store | None = None,
    ):
        self.compute, self.device, self.store, self.updater = compute, device, store, updater
        self.layouts, self.plan, self.model = layouts, plan, model
        self._order = parameter_order
        self._weight_decay = weight_decay
        self._relief, self._scratch = relief, scratch
        self.busy_seconds = {"compute": 0.0, "update": 0.0}
        self._steps: dict[int, StepState] = {}
        self._tasks: dict[Key, Task] = {}
        self._buffers: dict[Key, HostBuffer] = {}
        self._device_weights: dict[Key, Tensor] = {}
        self._device_gradients: dict[int, Tensor] = {}
        self._undo: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._arena = arena
        self._cores: AbstractContextManager[Any] = nullcontext() if device.separate_memory else threading.RLock()
        self.scheduler = Scheduler(model, plan)
        self._make_pools(arena)
        self._load_residents(arena)
        # Whether there is a native kernel is found out with torch's operators, here and not on the lane that updates.
        updater.path  # noqa: B018
        GradNorm.tensor_norm(torch.zeros(1 << 16, dtype=updater.wire_dtype))
        # Computing is done by the thread that asks for a step, whose helpers for large operators it then shares with
        # whatever else that thread computes: see cores.py.
        serves = () if device.separate_memory else ("cpu_update",)
        self.lanes = Lanes(LANES, on_failure=self._fail_pools, callers="gpu", serves=serves)
        # Without native kernels, and with a loss scale, updates and norms take memory of their own, for which a block's
        # backward has no room.
        small = updater.path == "native" and updater.wire_dtype != torch.float16
        compute.between_gradients = self._let_updates_in if serves and small else None

    def _make_pools(self, arena: Arena) -> None:
        plan, units = self.plan, range(len(self.layouts))
        streamed = [self.layouts[u].pieces.weights_bytes for u in units if u not in plan.resident_weights]
        states = [
            piece.state_bytes for u in units if u not in plan.resident_state for piece in self.layouts[u].pieces.pieces
        ]
        trained = [layout.pieces.weights_bytes for layout in self.layouts if layout.pieces.state_bytes]
        poison = self.device.poisons
        self._weights_pool = Pool(arena, max(streamed, default=0), plan.weights_slabs, poison=poison)
        self._state_pool = Pool(arena, max(states, default=0), plan.state_slabs, poison=poison)
        self._gradient_pool = Pool(arena, max(trained, default=0), plan.gradient_slabs, poison=poison)
        self.swapper = Swapper(self.device, arena, plan, self._scratch)
        self._pools = (self._weights_pool, self._state_pool, self._gradient_pool, self.swapper.transit)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Add up what computing and updating take by themselves, without their waits."""
        started = time.perf_counter()
        yield
        self.busy_seconds[what] += time.perf_counter() - started

    def _load_residents(self, arena: Arena) -> None:
        """Units that stay in memory are read once."""
        self._resident_weights: dict[int, HostBuffer] = {}
        self._resident_state: dict[tuple[int, int], HostBuffer] = {}
        handles = []
        for unit in sorted(self.plan.resident_weights):
            layout = self.layouts[unit]
            if not layout.pieces.weights_bytes:
                continue
            buffer = HostBuffer(arena.lease(layout.pieces.weights_bytes).padded)
            self._resident_weights[unit] = buffer
            handles.append(self.store.read_group(layout.weights_group, buffer.view))
            if unit not in self.plan.resident_state:
                continue
            for index, piece in enumerate(layout.pieces.pieces):
                if piece.state_bytes:
                    state = HostBuffer(arena.lease(piece.state_bytes).padded)
                    self._resident_state[unit, index] = state
                    handles.append(self.store.read(layout.state_record(index), state.view))
        for handle in handles:
            handle.wait()

    def _fail_pools(self, error: BaseException) -> None:
        for pool in self._pools:
            pool.fail(error)

    # -- a step, from outside -------------------------------------------------------------------------

    def start(self, state: StepState, micro_batches: Sequence[MicroBatch], ops: Sequence[Op]) -> None:
        """Put a training step on the lanes."""
        self._steps[state.step] = state
        self.put(ops, begin=lambda: self.compute.begin(state.step, micro_batches, training=True))

    def put(self, ops: Sequence[Op], begin: Callable[[], None] | None = None) -> None:
        """Turn operations into tasks. `begin` runs on the compute lane, before the first of them there."""
        for op in ops:
            first = op.key.kind == "forward" and op.key.unit == 0 and op.key.piece == 0
            run = self._bind(op, begin if first else None)
            waits = [self._tasks[key] for key in op.waits if key in self._tasks]
            label = f"{op.key.kind} {op.key.unit}" if op.key.unit >= 0 else op.key.kind
            task = Task(op.key, op.lane, label, waits, run)
            self._tasks[op.key] = task
            self.lanes.put([task])  # at once: the first of them run while the last are made

    def _bind(self, op: Op, begin: Callable[[], None] | None) -> Callable[[], Handle | None]:
        method: Callable[[Op], Handle | None] = getattr(self, f"_{op.key.kind}")

        def run() -> Handle | None:
            self.device.pause(op.lane)
            if begin is not None:
                begin()
            return method(op)

        return run

    def change_clip(self, clip: str) -> None:
        """Use another clip mode from the next step on."""
        if clip != self.plan.clip:
            self.plan = self.scheduler.plan = replace(self.plan, clip=clip)

    def wait(self, key: Key) -> None:
        """Until an operation is done; raises what failed."""
        task = self._tasks.get(key)
        if task is not None:
            with as_in_a_new_thread():
                self.lanes.wait(task)

    def wait_all(self) -> None:
        """Until everything put so far is done."""
        with as_in_a_new_thread():
            for task in list(self._tasks.values()):
                self.lanes.wait(task)

    def prune(self, before_step: int) -> None:
        """Forget finished operations of old steps."""
        self._tasks = {k: t for k, t in self._tasks.items() if k.step >= before_step or not t.done.is_set()}
        self._steps = {step: state for step, state in self._steps.items() if step >= before_step}

    def close(self) -> None:
        """Finish or drop what is queued and end the threads."""
        self.lanes.close()
        self.compute.close()

    # -- reading and copying --------------------------------------------------------------------------

    def _read_weights(self, op: Op) -> Handle:
        layout = self.layouts[op.key.unit]
        buffer = self._buffers[op.key] = self._weights_pool.lease()
        return self.store.read_group(layout.weights_group, buffer.view[: layout.pieces.weights_bytes])

    def _host_weights(self, unit: int, source: Key | None) -> HostBuffer | None:
        return self._buffers[source] if source is not None else self._resident_weights.get(unit)

    def _to_gpu(self, op: Op) -> None:
        unit = op.key.unit
        host = self._host_weights(unit, op.source)
        size = self.layouts[unit].pieces.weights_bytes
        if host is None or not size:
            return
        with self.device.lane("to_gpu"):
            memory = self.device.empty(size)
            self.device.to_device(host.tensor[:size], memory)
        self._device_weights[op.key] = memory

    def _weights_for(self, op: Op, phase: str, unit: int) -> Tensor | None:
        """The unit's weights where the device can reach them."""
        if self.device.separate_memory:
            return self._device_weights.get(Key(op.key.step, "to_gpu", unit, -1, phase))
        source = op.source if unit == op.key.unit else Key(op.key.step, "read_weights", unit, -1, phase)
        host = (
            self._resident_weights.get(unit) if source is None or source not in self._buffers else self._buffers[source]
        )
        return None if host is None else host.tensor

    def _free_weights(self, op: Op, phase: str, unit: int) -> None:
        memory = self._device_weights.pop(Key(op.key.step, "to_gpu", unit, -1, phase), None)
        if memory is not None:
            self.device.free(memory)

    # -- computing ------------------------------------------------------------------------------------

    def _forward(self, op: Op) -> None:
        unit, micro_batch, head = op.key.unit, op.key.piece, len(self.layouts) - 1
        state = self._steps.get(op.key.step)
        last = micro_batch == self.compute.num_micro_batches - 1
        buffer = self._gradient_buffer(unit) if unit == head and last and state is not None else None
        tied = self._weights_for(op, "h", 0) if unit == head and self.model.tied else None
        with self._cores, self._timed("compute"), self.device.lane("gpu"), self.device.compute(op.flops):
            scale = state.scale if state is not None else None
            self.compute.forward(unit, micro_batch, self._weights_for(op, "f", unit), tied, scale)
            if unit == head and last and state is not None:
                state.missing[unit] = self.compute.take_gradient(unit, _target(buffer))
        if buffer is not None:
            self._gradient_made(op.key.step, unit, buffer)
        if last:
            self._free_weights(op, "f", unit)
        self._relieve(step_over=False)
        if last and unit == head:
            self._free_weights(op, "h", 0)

    def _backward(self, op: Op) -> None:
        unit, micro_batch, state = op.key.unit, op.key.piece, self._steps[op.key.step]
        last = micro_batch == self.compute.num_micro_batches - 1
        buffer = self._gradient_buffer(unit) if last else None
        with self._cores, self._timed("compute"), self.device.lane("gpu"), self.device.compute(op.flops):
            self.compute.backward(unit, micro_batch, self._weights_for(op, "b", unit), state.scale)
            if last:
                state.missing[unit] = self.compute.take_gradient(unit, _target(buffer))
        if buffer is not None:
            self._gradient_made(op.key.step, unit, buffer)
        self.swapper.free((unit, micro_batch))
        if last:
            self._free_weights(op, "b", unit)
        self._relieve(step_over=last and unit == 0)

    def _let_updates_in(self) -> None:
        """Inside a block's backward, on `cpu`: where the drive waits for room for state, updates that can run go first.

        Otherwise the end of the block is soon enough. With few slabs it is not: the drive would stand still until then.
        """
        if not self._state_pool.is_exhausted():
            return
        started = time.perf_counter()
        self.lanes.serve_ready()
        self.busy_seconds["compute"] -= time.perf_counter() - started

    def _relieve(self, *, step_over: bool) -> None:
        """Between two micro-batches, or two steps."""
        if self._relief is not None:
            self._relief.relieve(step_over=step_over)

    def _gradient_buffer(self, unit: int) -> HostBuffer | _DeviceBuffer | None:
        """Where a unit's gradient is cast to: device memory, or on `cpu` the slab it stays in."""
        if not self.layouts[unit].pieces.state_bytes:
            return None
        if self.device.separate_memory:
            return _DeviceBuffer(self.device.empty(self.layouts[unit].pieces.weights_bytes))
        # A slab comes back when an update has read it, and on this device it is this thread that updates.
        self.lanes.serve(self._gradient_pool.has_free)
        return self._gradient_pool.lease()

    def _gradient_made(self, step: int, unit: int, buffer: HostBuffer | _DeviceBuffer) -> None:
        if isinstance(buffer, HostBuffer):
            self._buffers[Key(step, "gradient", unit)] = buffer
        else:
            self._device_gradients[unit] = buffer.tensor

    def _gradient(self, op: Op) -> None:
        memory = self._device_gradients.pop(op.key.unit)
        buffer = self._gradient_pool.lease()
        with self.device.lane("to_host"):
            self.device.to_host(memory, buffer.tensor[: memory.numel()])
        self.device.free(memory)
        self._buffers[op.key] = buffer

    # -- activations ----------------------------------------------------------------------------------

    def _act_out(self, op: Op) -> None:
        place = (op.key.unit, op.key.piece)
        self.swapper.out(place, self.compute.cuts[op.key.piece].saved[op.key.unit - 1])

    def _act_write(self, op: Op) -> Handle:
        return self.swapper.write((op.key.unit, op.key.piece))

    def _act_read(self, op: Op) -> Handle:
        return self.swapper.read((op.key.unit, op.key.piece))

    def _act_in(self, op: Op) -> None:
        self.swapper.back((op.key.unit, op.key.piece))

    def write_residents(self) -> None:
        """Write through what only lives in memory, with nothing under way."""
        handles = []
        for unit, buffer in self._resident_weights.items():
            layout = self.layouts[unit]
            if layout.pieces.state_bytes:
                handles.append(self.store.write_group(layout.weights_group, buffer.view))
        for (unit, index), buffer in self._resident_state.items():
            handles.append(self.store.write(self.layouts[unit].state_record(index), buffer.view))
        for handle in handles:
            handle.wait()

    # -- gradients ------------------------------------------------------------------------------------

    def _norm(self, op: Op) -> None:
        """The norm of each gradient as the update receives it. Finite norms mean finite gradients."""
        assert op.gradient is not None
        unit, state = op.key.unit, self._steps[op.key.step]
        layout, buffer = self.layouts[unit], self._buffers[op.gradient]
        with self._cores, self._timed("update"):
            for index, param in enumerate(layout.spec.params):
                if not param.trainable or index in state.missing[unit]:
                    continue
                gradient = layout.tensor(buffer.tensor, index)
                if state.scale is not None:
                    gradient = gradient.to(torch.float32)
                    finite = bool(torch.isfinite(gradient).all())
                    state.overflow |= not finite
                    gradient *= 1.0 / state.scale
                norm = state.norms[param.name] = GradNorm.tensor_norm(gradient)
                if state.scale is None and not torch.isfinite(norm) and not bool(torch.isfinite(gradient).all()):
                    raise NonFinite(
                        f"The gradient of {param.name} is not finite in step {state.step} (unit {layout.spec.name}). "
                        "The step was not committed. Lower learning_rate, or look at this step's data.",
                        step=state.step, micro_batch=None, unit=layout.spec.name,
                    )  # fmt: skip

    def _clip(self, op: Op) -> None:
        state = self._steps[op.key.step]
        norms = [state.norms[name] for name in self._order if name in state.norms]
        state.total_norm = GradNorm.total_norm(norms)
        if state.max_grad_norm is not None:
            state.coefficient = GradNorm.clip_coefficient(state.total_norm, state.max_grad_norm)
        if state.describe is not None:
            state.metadata = state.describe(state)

    def _spill(self, op: Op) -> Handle:
        assert op.gradient is not None
        layout = self.layouts[op.key.unit]
        view = self._buffers[op.gradient].view[: layout.pieces.weights_bytes]
        return self.store.write(layout.gradient_record, view)

    def _read_gradient(self, op: Op) -> Handle:
        layout = self.layouts[op.key.unit]
        buffer = self._buffers[op.key] = self._gradient_pool.lease()
        return self.store.read(layout.gradient_record, buffer.view[: layout.pieces.weights_bytes])

    # -- updating -------------------------------------------------------------------------------------

    def _read_state(self, op: Op) -> Handle:
        layout = self.layouts[op.key.unit]
        size = layout.pieces.pieces[op.key.piece].state_bytes
        buffer = self._buffers[op.key] = self._state_pool.lease()
        return self.store.read(layout.state_record(op.key.piece), buffer.view[: round_up(size)])

    def _state_buffer(self, op: Op) -> HostBuffer:
        key = op.key
        resident = self._resident_state.get((key.unit, key.piece))
        return resident or self._buffers[Key(key.step, "read_state", key.unit, key.piece, key.phase)]

    def _update(self, op: Op) -> None:
        key, state = op.key, self._steps[op.key.step]
        layout = self.layouts[key.unit]
        piece = layout.pieces.pieces[key.piece]
        weights, states = self._host_weights(key.unit, op.source), self._state_buffer(op)
        assert weights is not None
        assert op.gradient is not None
        gradient = self._buffers[op.gradient]
        multipliers: list[float | Tensor] = [] if state.scale is None else [1.0 / state.scale]
        if state.coefficient is not None and key.phase != "b":
            multipliers.append(state.coefficient)
        with self._cores, self._timed("update"):
            if state.undoable and key.phase in ("b", "s"):
                self._keep_undo(key, piece.weights_offset, piece.weights_bytes, weights, states)
            for chunk in piece.chunks:
                param = layout.spec.params[chunk.tensor]
                if chunk.tensor in state.missing[key.unit]:
                    continue
                size = self.updater.state_bytes(chunk.num_elements)
                self.updater.update(
                    layout.chunk(weights.tensor, chunk),
                    states.tensor[chunk.state_offset : chunk.state_offset + size],
                    layout.chunk(gradient.tensor, chunk),
                    step=state.update_step - state.lag.get(param.name, 0),
                    lr=state.learning_rate,
                    weight_decay=self._weight_decay(param.name, param.shape),
                    grad_multipliers=tuple(multipliers),
                    in_team=self.lanes.on_callers_thread,
                )

    def _keep_undo(self, key: Key, offset: int, size: int, weights: HostBuffer, states: HostBuffer) -> None:
        """What is on SSD is safe in its old version; what is resident needs a copy to go back to."""
        if key.unit not in self.plan.resident_weights:
            return
        old_state = _copied(states.tensor) if (key.unit, key.piece) in self._resident_state else torch.empty(0)
        self._undo[key.unit, key.piece] = (_copied(weights.tensor[offset : offset + size]), old_state)

    def _write(self, op: Op) -> Handle:
        key, layout = op.key, self.layouts[op.key.unit]
        piece = layout.pieces.pieces[key.piece]
        weights = self._host_weights(key.unit, op.source)
        assert weights is not None
        handles = []
        if self._steps[key.step].commit or key.unit not in self.plan.resident_weights:
            view = weights.view[piece.weights_offset : piece.weights_offset + round_up(piece.weights_bytes)]
            handles.append(self.store.write(layout.weights_record(key.piece), view))
        if key.phase == "k" and key.unit not in self.plan.resident_state:
            return join(handles)  # its state was never anywhere else
        states = self._state_buffer(op)
        handles.append(self.store.write(layout.state_record(key.piece), states.view[: round_up(piece.state_bytes)]))
        joined = join(handles)
        if states.of_pool:
            del self._buffers[Key(key.step, "read_state", key.unit, key.piece, key.phase)]
            joined.then(lambda _: states.release())
        return joined

    def _barrier(self, op: Op) -> None:
        """Only its waits matter."""

    def _evict(self, op: Op) -> None:
        assert op.source is not None
        self._buffers.pop(op.source).release()

    # -- versions -------------------------------------------------------------------------------------

    def _begin(self, op: Op) -> None:
        self.store.begin(op.key.step, undoable=self._steps[op.key.step].undoable)

    def _rollback(self, op: Op) -> None:
        self.store.rollback()
        for (unit, index), (old_weights, old_state) in self._undo.items():
            piece = self.layouts[unit].pieces.pieces[index]
            weights = self._resident_weights[unit].tensor
            copy_bytes(old_weights, weights[piece.weights_offset : piece.weights_offset + piece.weights_bytes])
            if old_state.numel():
                copy_bytes(old_state, self._resident_state[unit, index].tensor)
        self._undo.clear()

    def _commit(self, op: Op) -> Handle:
        return self.store.commit(op.key.step, self._steps[op.key.step].metadata)


@contextmanager
def as_in_a_new_thread() -> Iterator[None]:
    """With torch's defaults, whatever the caller has switched: a step is the same step inside no_grad or autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@dataclass(frozen=True, slots=True)
class _DeviceBuffer:
    tensor: Tensor


def _copied(tensor: Tensor) -> Tensor:
    copied = torch.empty_like(tensor)
    copy_bytes(tensor, copied)
    return copied


def _target(buffer: HostBuffer | _DeviceBuffer | None) -> Tensor:
    return torch.empty(0, dtype=torch.uint8) if buffer is None else buffer.tensor


def join(handles: Sequence[Handle]) -> Handle:
    """One handle that is done when all are; it has the first error."""
    if len(handles) == 1:
        return handles[0]
    joined = Handle("; ".join(handle.what for handle in handles))
    left, guard = len(handles), threading.Lock()

    def one_done(_: Handle) -> None:
        nonlocal left
        with guard:
            left -= 1
            last = left == 0
        if last:
            joined.finish(error=next((handle.error for handle in handles if handle.error is not None), None))

    for handle in handles:
        handle.then(one_done)
    return joined
