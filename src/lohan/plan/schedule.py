"""The Schedule: what a step does, as an ordered list of operations with their lanes and waits.

The engine runs this list and the simulator runs the same list on a virtual clock. A lane does its operations
in the order given; an operation starts when all it waits for is done; nothing else orders anything. An
operation without a lane (evict) happens by itself when its waits are over.

Computing, and moving activations, is one operation for each unit and micro-batch (the key's piece is the micro-batch);
all others are for a unit or one of its pieces. Activations have their own lanes to and from the SSD, because they wait
for room on the device, and weights and state must not wait behind them.

Reading order on the drive, backward: the weights of unit u - 1 come before the state of unit u, because
the device needs them first; and reads never wait for the writes of earlier units, so the drive works while the
update computes.

    forward    read_weights -> to_gpu -> forward -> act_out -> act_write
    backward   read_weights -> to_gpu, act_read -> act_in -> backward -> gradient -> norm
    update     read_state -> update -> write
    held       spill -> read_gradient (only when gradients wait on SSD)

Systems we compare with add waits, not operations: a barrier between steps, a unit's state read, updated and written as
a whole, a device that waits for updates. They are fields of the Plan like all the rest.

Pure: no torch, no files, no clock. The same calls give the same lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lohan.plan.activations import recompute_flops
from lohan.plan.plan import ModelSize, Plan

LANES = ("gpu", "to_gpu", "to_host", "ssd_read", "ssd_write", "cpu_update", "swap_in", "swap_out")
_LANE = {
    "read_weights": "ssd_read",
    "to_gpu": "to_gpu",
    "forward": "gpu",
    "act_out": "to_host",
    "act_write": "swap_out",
    "act_read": "swap_in",
    "act_in": "to_gpu",
    "backward": "gpu",
    "gradient": "to_host",
    "spill": "ssd_write",
    "read_gradient": "ssd_read",
    "norm": "cpu_update",
    "clip": "cpu_update",
    "read_state": "ssd_read",
    "update": "cpu_update",
    "write": "ssd_write",
    "begin": "ssd_write",
    "rollback": "ssd_write",
    "commit": "ssd_write",
    "barrier": "",
    "evict": "",
}


class Key(NamedTuple):
    """The name of one operation of a run. A buffer has the name of the operation that fills it."""

    step: int
    kind: str
    unit: int = -1
    piece: int = -1
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation."""

    key: Key
    waits: tuple[Key, ...] = ()
    source: Key | None = None
    """The buffer with the unit's weights (for an update, write, copy or compute) or to be evicted."""

    gradient: Key | None = None
    """The buffer with the unit's gradient."""

    num_bytes: int = 0
    flops: float = 0.0

    @property
    def lane(self) -> str:
        return _LANE[self.key.kind]


class Scheduler:
    """Builds the operations of one step after another, and knows what the steps before have left to do."""

    def __init__(self, model: ModelSize, plan: Plan):
        self.model = model
        self.plan = plan
        """May be replaced between steps by one that differs in `clip` or `left_units`."""
        self._ops: list[Op] = []
        self._last_update: dict[tuple[int, int], Key] = {}
        self._last_write: dict[tuple[int, int], Key] = {}
        self._left: list[int] = []
        """Units whose update the last step left, lowest first."""
        self._left_step = 0
        self._left_commit = False
        self._commits = False
        """Whether the step whose updates are being scheduled is to be committed."""
        self._gradient: dict[int, Key] = {}
        """The buffers in memory that hold a gradient somebody still needs, and who that is."""
        self._gradient_users: dict[int, list[Key]] = {}
        self._backward_source: dict[int, Key | None] = {}
        """The buffers with the weights that backward works with, and who uses them."""
        self._backward_users: dict[int, list[Key]] = {}
        self._micro_batches = 1
        """Of the step being scheduled."""
        self._computes: list[Key] = []
        """What it computes, in order."""
        self._last_out: list[Key] = []
        """The last to leave the device for SSD."""
        self._last_commit: list[Key] = []
        self._carried: Key | None = None
        """The buffer with the embedding's new weights: their update is last and their forward is next, so that this one
        waits for the update, and not until they are written and read again."""
        self._barrier: Key | None = None
        """What the step being scheduled begins behind, and the lanes that know it already."""
        self._behind_barrier: set[str] = set()
        self._in_flight: list[list[Key]] = []
        """Of units updated last, what ends the stay of their state in host memory; one entry for each unit."""

    # -- one step -------------------------------------------------------------------------------------

    def step(self, step: int, *, commit: bool, micro_batches: int = 1) -> list[Op]:
        """A training step. The updates it leaves come with the next step, or with drain()."""
        plan, units = self.plan, self.model.units
        self._micro_batches, self._computes, self._last_out = micro_batches, [], []
        head = len(units) - 1
        self._accept()
        if plan.barrier:
            self._stand_still(step)
        left, left_step = self._left, self._left_step
        if not left:
            self._add(Key(step, "begin"))
        for unit in range(len(units)):
            updated: Key | None = None
            if unit == 0:
                updated, self._carried = self._carried, None
            if unit in left:
                self._commits = self._left_commit
                updated = self._update(left_step, unit, "u", keep_source=True)
            self._forward(step, unit, updated=updated)
            if left and unit == left[-1]:
                self._end_left()
                self._add(Key(step, "begin"))
        self._commits = commit
        self._offload_gradient(step, head, self._computed(step, head))  # the head's forward is its backward too
        for unit in reversed(range(head)):
            self._fetch_for_backward(step, unit)
            self._finish_unit(step, unit + 1)
            self._backward(step, unit)
        # The step's answer, before the last update: nobody has to wait for that one but the next forward.
        self._add(Key(step, "clip"), [Key(step, "norm", u) for u in range(len(units)) if self._trained(u)])
        self._finish_unit(step, 0)
        if plan.separate_stage:
            for unit in range(len(units)):
                if self._trained(unit) and not plan.leaves(unit):
                    self._update(step, unit, "s", extra=(self._computed(step, 0),))
        self._left = sorted(u for u in range(len(units)) if plan.leaves(u) and self._trained(u))
        self._left_step, self._left_commit = step, commit
        if commit and not self._left and plan.clip != "speculative":
            self._commit(step)
        self._barrier = None
        return self._take()

    def _stand_still(self, step: int) -> None:
        """What the step before left is done first; nothing of this one begins before all of it is."""
        self._finish_left()
        self._accept()
        done = [*self._last_update.values(), *self._last_write.values(), *self._last_commit]
        self._barrier, self._behind_barrier = self._add(Key(step, "barrier"), done), set()

    def settle(self, step: int, *, redo: bool, skip: bool) -> list[Op]:
        """After a speculative step: its norm is known. Keep its updates, redo them with the clip, or drop them.

        Units that are left for the next forward were not guessed: they will use the clip, or are dropped too.
        """
        if redo or skip:
            rollback = Key(step, "rollback")
            done = [k for k in (*self._last_write.values(), *self._last_update.values()) if k.step == step]
            self._add(rollback, done)
            self._drop_carried()
            # From here on the rollback is what made these weights and this state.
            for last in (self._last_write, self._last_update):
                last.update({place: rollback for place, key in last.items() if key.step == step})
        if skip:
            self._left = []
        elif redo:
            for unit in range(len(self.model.units)):
                if self._trained(unit) and not self.plan.leaves(unit):
                    self._update(step, unit, "r", extra=(Key(step, "rollback"),))
        self._accept()
        if self._commits and not self._left:
            if skip:
                self._write_residents(step)
            self._commit(step)
        return self._take()

    def skip(self) -> list[Op]:
        """After a deferred step that overflowed: its updates never happen."""
        step, commit, self._left = self._left_step, self._left_commit, []
        self._accept()
        if commit:
            self._write_residents(step)
            self._commit(step)
        return self._take()

    def _write_residents(self, step: int) -> None:
        """A skipped step is committed: what earlier steps only changed in memory has to be on SSD for that."""
        plan = self.plan
        for unit in sorted(plan.resident_weights):
            size = self.model.units[unit]
            for piece in size.trained_pieces:
                moved = size.piece_weights_bytes[piece]
                moved += size.state_bytes[piece] if unit in plan.resident_state else 0
                waits = [last[unit, piece] for last in (self._last_update, self._last_write) if (unit, piece) in last]
                write = Key(step, "write", unit, piece, "k")
                self._last_write[unit, piece] = self._add(write, waits, num_bytes=moved)

    def drain(self) -> list[Op]:
        """Whatever the last step left, now, without a next forward."""
        self._drop_carried()
        self._finish_left()
        self._accept()
        return self._take()

    def _finish_left(self) -> None:
        if self._left:
            self._commits = self._left_commit
            for unit in self._left:
                self._update(self._left_step, unit, "u")
            self._end_left()

    def evaluate(self, step: int, *, micro_batches: int = 1) -> list[Op]:
        """Forward only, on what training has made so far. `step` only has to be a number of its own."""
        self._micro_batches, self._computes, self._last_out = micro_batches, [], []
        self._drop_carried()
        for unit in range(len(self.model.units)):
            self._forward(step, unit, updated=None, evaluate=True)
        return self._take()

    def _drop_carried(self) -> None:
        """The next forward reads the embedding's weights like all others."""
        if self._carried is not None:
            self._evict(self._carried, [self._last_write[0, piece] for piece in self.model.units[0].trained_pieces])
            self._carried = None

    def _accept(self) -> None:
        """Held gradients that nobody needs any more."""
        for unit in [u for u in self._gradient if u not in self._left]:
            self._release_gradient(unit)

    # -- pieces of a step -----------------------------------------------------------------------------

    def _forward(self, step: int, unit: int, *, updated: Key | None, evaluate: bool = False) -> None:
        plan, units = self.plan, self.model.units
        head = len(units) - 1
        source = updated
        fresh = [self._last_update[unit, p] for p in units[unit].trained_pieces if (unit, p) in self._last_update]
        if unit not in plan.resident_weights and updated is None:
            source = self._read_weights(step, unit, "f")
        waits = [source] if source is not None and updated is None else []
        # Updated in place, in resident memory or in the slab the update was read into.
        waits += fresh if updated is not None or unit in plan.resident_weights else []
        tied: Key | None = None
        if unit == head and self.model.tied and 0 not in plan.resident_weights:
            tied = self._read_weights(step, 0, "h")
        compute_waits: list[Key] = []
        users: list[Key] = []
        if plan.separate_memory:
            room = self._room_for_weights(step, unit)
            copy = self._add(
                Key(step, "to_gpu", unit, -1, "f"), [*waits, *room], source=source, num_bytes=self._bytes(unit)
            )
            compute_waits.append(copy)
            users.append(copy)
            if unit == head and self.model.tied:
                fresh_tied = [self._last_update[0, p] for p in units[0].trained_pieces if (0, p) in self._last_update]
                tied_waits = [tied] if tied is not None else fresh_tied
                key = Key(step, "to_gpu", 0, -1, "h")
                copy = self._add(key, [*tied_waits, *room], source=tied, num_bytes=self._bytes(0))
                compute_waits.append(copy)
                if tied is not None:
                    self._evict(tied, [copy])
                tied = None
        else:
            compute_waits += waits + ([tied] if tied is not None else [])
        flops = units[unit].forward_flops * (3 if unit == head and not evaluate else 1) / self._micro_batches
        for micro_batch in range(self._micro_batches):
            self._forward_one(step, unit, micro_batch, compute_waits, source, flops, evaluate=evaluate)
            compute_waits = []
        last = self._computes[-1]
        if not plan.separate_memory:
            users.append(last)
            if tied is not None:
                self._evict(tied, [last])
        if updated is not None:
            users += [self._last_write[unit, piece] for piece in units[unit].trained_pieces]
        if unit == head and not evaluate:
            self._backward_source[unit], self._backward_users[unit] = source, users  # kept for the head's update
        elif source is not None:
            self._evict(source, users)

    def _forward_one(
        self,
        step: int,
        unit: int,
        micro_batch: int,
        waits: Iterable[Key],
        source: Key | None,
        flops: float,
        *,
        evaluate: bool,
    ) -> None:
        """A unit's forward for one micro-batch, and what it sends away."""
        plan, key = self.plan, Key(step, "forward", unit, micro_batch)
        before = [Key(step, "forward", unit - 1, micro_batch)] if unit else []
        tiers = frozenset() if evaluate else self._tiers(unit)
        if not evaluate and len(self._computes) >= plan.swap_window:  # room for what this one makes
            earlier = self._computes[len(self._computes) - plan.swap_window]
            if self._tiers(earlier.unit):
                before.append(Key(step, "act_out", earlier.unit, earlier.piece))
        self._add(key, [*before, *waits], source=source, flops=flops)
        self._computes.append(key)
        if not tiers:
            return
        away, to_ssd = self._moved_bytes(unit)
        out = self._add(Key(step, "act_out", unit, micro_batch), [key], num_bytes=away)
        if "ssd" in tiers:
            self._last_out = [out]
            self._add(Key(step, "act_write", unit, micro_batch), [out], num_bytes=to_ssd)

    def _tiers(self, unit: int) -> frozenset[str]:
        return self.plan.tiers(unit) if self.model.units[unit].kind == "block" else frozenset()

    def _moved_bytes(self, unit: int) -> tuple[int, int]:
        """What one micro-batch of a unit sends away from the device, and how much of that goes on to SSD."""
        plan, size = self.plan, self.model.units[unit]
        sizes = [(size.input_bytes, plan.input_tier(unit))]
        for op, tier in plan.keeps(unit).items():
            if op < len(size.operators):
                sizes.append((size.operators[op].output_bytes, tier))
        tiers = self._tiers(unit)
        return sum(b for b, tier in sizes if tier in tiers), sum(b for b, tier in sizes if tier == "ssd")

    def _room_for_weights(self, step: int, unit: int, *, backward: bool = False) -> list[Key]:
        """Weights come to the device when the unit that much earlier has been computed and has made room."""
        head = len(self.model.units) - 1
        stage = (2 * head - unit if backward else unit) - self.plan.device_units
        if stage < 0:
            return []
        kind, which = ("forward", stage) if stage <= head else ("backward", 2 * head - stage)
        return [Key(step, kind, which, self._micro_batches - 1)]

    def _fetch_for_backward(self, step: int, unit: int) -> None:
        plan, size = self.plan, self.model.units[unit]
        source: Key | None = None
        users: list[Key] = []
        updates_now = self._trained(unit) and not plan.leaves(unit) and not plan.separate_stage
        if (size.kind == "block" or updates_now) and unit not in plan.resident_weights:
            source = self._read_weights(step, unit, "b")
        if plan.separate_memory and size.kind == "block":
            waits = [source] if source is not None else []
            waits += self._room_for_weights(step, unit, backward=True)
            key = Key(step, "to_gpu", unit, -1, "b")
            users.append(self._add(key, waits, source=source, num_bytes=self._bytes(unit)))
        self._backward_source[unit], self._backward_users[unit] = source, users

    def _backward(self, step: int, unit: int) -> None:
        plan, size = self.plan, self.model.units[unit]
        waits = [self._computed(step, unit + 1)]
        source = self._backward_source[unit]
        if size.kind == "block":
            if plan.separate_memory:
                waits.append(Key(step, "to_gpu", unit, -1, "b"))
            elif source is not None:
                waits.append(source)
        if plan.device_waits:
            updates = [self._last_update.get((unit + 1, p)) for p in self.model.units[unit + 1].trained_pieces]
            waits += [key for key in updates if key is not None and key.step == step]
        above = unit + plan.device_units
        if plan.separate_memory and above < len(self.model.units) and self._trained(above):
            waits.append(Key(step, "gradient", above))  # room on the device for this one's
        forward = size.forward_flops / self._micro_batches
        again = recompute_flops(size.operators, plan.keeps(unit)) if size.operators else forward
        for micro_batch in range(self._micro_batches):
            if self._tiers(unit):
                waits.append(self._bring_back(step, unit, micro_batch))
            key = Key(step, "backward", unit, micro_batch)
            self._add(key, waits, source=source, flops=2 * forward + again)
            self._computes.append(key)
            waits = []
        self._backward_users[unit].append(self._computes[-1])
        self._offload_gradient(step, unit, self._computes[-1])

    def _bring_back(self, step: int, unit: int, micro_batch: int) -> Key:
        """What was sent away comes back while the operation before is computed."""
        back, to_ssd = self._moved_bytes(unit)
        waits = [Key(step, "act_out", unit, micro_batch)]
        if "ssd" in self._tiers(unit):
            written = Key(step, "act_write", unit, micro_batch)
            # Not while others still have to leave through the same slabs.
            read = self._add(Key(step, "act_read", unit, micro_batch), [written, *self._last_out], num_bytes=to_ssd)
            waits = [read]
        if len(self._computes) >= self.plan.swap_window:
            waits.append(self._computes[len(self._computes) - self.plan.swap_window])
        return self._add(Key(step, "act_in", unit, micro_batch), waits, num_bytes=back)

    def _offload_gradient(self, step: int, unit: int, computed: Key) -> None:
        if not self._trained(unit):
            return
        plan, buffer = self.plan, Key(step, "gradient", unit)
        waits = [computed]
        if plan.separate_memory:
            waits = [self._add(buffer, [computed], num_bytes=self._bytes(unit))]
        users = [self._add(Key(step, "norm", unit), waits, gradient=buffer)]
        if plan.gradients_on_ssd and plan.holds_gradient(unit):
            users.append(self._add(Key(step, "spill", unit), waits, gradient=buffer, num_bytes=self._bytes(unit)))
        self._gradient[unit], self._gradient_users[unit] = buffer, users

    def _finish_unit(self, step: int, unit: int) -> None:
        """What follows a unit's gradient in this step: its update, or only letting go of what it used."""
        plan, source = self.plan, self._backward_source.pop(unit)
        users = self._backward_users.pop(unit)
        if self._trained(unit) and not plan.leaves(unit) and not plan.separate_stage:
            carry = unit == 0 and not plan.barrier
            self._update(step, unit, "b", source=source, users=users, keep_source=carry)
            self._carried = source if carry else self._carried
        elif source is not None:
            self._evict(source, users)
        if unit in self._gradient and (plan.gradients_on_ssd or not plan.holds_gradient(unit)):
            self._release_gradient(unit)

    def _update(
        self,
        step: int,
        unit: int,
        phase: str,
        *,
        source: Key | None = None,
        users: Iterable[Key] = (),
        extra: tuple[Key, ...] = (),
        keep_source: bool = False,
    ) -> Key | None:
        """The update of one unit. Returns the buffer its new weights are in, kept for the caller to evict if asked.

        Phases: "b" right behind the unit's backward, with the weights that backward read; "u" left for the next
        forward; "s" in a stage of its own; "r" again, after a rollback. (A write has "k" too: kept as it was.)
        """
        plan, size = self.plan, self.model.units[unit]
        before = list(extra)
        room = list(extra)
        if phase == "b":
            before.append(Key(step, "gradient", unit) if plan.separate_memory else self._computed(step, unit))
            gradient = self._gradient[unit]
            room += before if plan.device_waits else []
        else:
            if phase == "u":
                before.append(Key(step, "clip"))
            if plan.gradients_on_ssd:
                gradient = Key(step, "read_gradient", unit, -1, phase)
                # A rollback leaves gradients alone, so their reading need not wait for it.
                waits = [Key(step, "spill", unit), *(extra if phase == "s" else ())]
                self._add(gradient, waits, num_bytes=self._bytes(unit))
                before.append(gradient)
            else:
                gradient = self._gradient[unit]
            if unit not in plan.resident_weights:
                source = self._read_weights(step, unit, phase, extra)
        if source is not None:
            before.append(source)
        reads: dict[int, Key] = {}
        updates: list[Key] = []
        writes: list[Key] = []
        whole = plan.blocks_in_flight > 0
        if whole and len(self._in_flight) >= plan.blocks_in_flight:
            room += self._in_flight[-plan.blocks_in_flight]
        for piece in size.trained_pieces if unit not in plan.resident_state else ():
            earlier = [self._last_write[unit, piece]] if (unit, piece) in self._last_write else []
            state = Key(step, "read_state", unit, piece, phase)
            reads[piece] = self._add(state, [*earlier, *room], num_bytes=size.state_bytes[piece])
        for piece in size.trained_pieces:
            waits = list(before)
            if unit in plan.resident_weights and (unit, piece) in self._last_write:
                waits.append(self._last_write[unit, piece])  # a write still reading what this update changes
            waits += reads.values() if whole else [reads[piece]] if piece in reads else []
            key = Key(step, "update", unit, piece, phase)
            updates.append(self._add(key, waits, source=source, gradient=gradient, num_bytes=size.state_bytes[piece]))
            self._last_update[unit, piece] = key
        for piece, key in zip(size.trained_pieces, updates, strict=True):
            if self._commits or unit not in plan.resident_state:
                moved = 0 if unit in plan.resident_state and not self._commits else size.state_bytes[piece]
                if self._commits or unit not in plan.resident_weights:
                    moved += size.piece_weights_bytes[piece]
                write = Key(step, "write", unit, piece, phase)
                writes.append(self._add(write, updates if whole else [key], source=source, num_bytes=moved))
                self._last_write[unit, piece] = write
        if whole:
            self._in_flight = [*self._in_flight, writes or updates][-plan.blocks_in_flight :]
        if phase != "b" and plan.gradients_on_ssd:
            self._evict(gradient, updates)
        else:
            self._gradient_users[unit] += updates
            if phase in "ur" or (phase == "s" and plan.clip != "speculative"):  # a guess may have to be done again
                self._release_gradient(unit)
        if source is not None and not keep_source:
            self._evict(source, [*users, *updates, *writes])
        return source

    def _end_left(self) -> None:
        self._left = []
        if self._left_commit:
            self._commit(self._left_step)

    def _commit(self, step: int) -> None:
        written = [key for key in self._last_write.values() if key.step == step]
        self._last_commit = [self._add(Key(step, "commit"), [Key(step, "clip"), *written])]

    def _read_weights(self, step: int, unit: int, phase: str, extra: tuple[Key, ...] = ()) -> Key:
        written = [
            self._last_write[unit, p] for p in self.model.units[unit].trained_pieces if (unit, p) in self._last_write
        ]
        key = Key(step, "read_weights", unit, -1, phase)
        return self._add(key, [*written, *extra], num_bytes=self._bytes(unit))

    def _release_gradient(self, unit: int) -> None:
        """Give the gradient's memory back once its users are done."""
        self._evict(self._gradient.pop(unit), self._gradient_users.pop(unit))

    def _computed(self, step: int, unit: int) -> Key:
        """The operation that ends a unit's gradient."""
        kind = "forward" if unit == len(self.model.units) - 1 else "backward"
        return Key(step, kind, unit, self._micro_batches - 1)

    def _trained(self, unit: int) -> bool:
        return bool(self.model.units[unit].trained_pieces)

    def _bytes(self, unit: int) -> int:
        return self.model.units[unit].weights_bytes

    def _evict(self, buffer: Key, users: Iterable[Key]) -> None:
        self._add(Key(buffer.step, "evict", buffer.unit, -1, f"{buffer.kind}.{buffer.phase}"), users, source=buffer)

    def _add(
        self,
        key: Key,
        waits: Iterable[Key] = (),
        *,
        source: Key | None = None,
        gradient: Key | None = None,
        num_bytes: int = 0,
        flops: float = 0.0,
    ) -> Key:
        lane = _LANE[key.kind]
        if self._barrier is not None and lane and lane not in self._behind_barrier:
            self._behind_barrier.add(lane)  # all that follows on this lane comes later anyway
            waits = [*waits, self._barrier]
        self._ops.append(Op(key, tuple(dict.fromkeys(waits)), source, gradient, num_bytes, flops))
        return key

    def _take(self) -> list[Op]:
        ops, self._ops = self._ops, []
        return ops
