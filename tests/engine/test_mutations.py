"""Removing any one wait of a schedule is caught: a wrong bit, or an error.

For every kind of wait that appears in any of the configurations below, one instance is removed, and the operation it
waited for is held back until the one that should have waited is done. So the race is lost every time, not by luck.
Waits that other waits and the order of lanes imply cannot be caught and need not be: the graph proves it for every
instance. What is ensured by something outside of the schedule is listed in GUARDED, with the reason.
"""

import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
import torch
from schedule_graph import ASYNCHRONOUS, Graph

from lohan.engine.devices import CpuDevice
from lohan.engine.engine import Engine
from lohan.engine.lanes import Lanes
from lohan.engine.run import open_run
from lohan.plan.schedule import Key
from lohan.store import Handle
from lohan.testing import parity, zoo
from lohan.testing.late_files import QuickFiles
from lohan.testing.parity import Case

STEPS, HOLD_SECONDS = 3, 1.5


def small(micro_batches=1, **values):
    return Case(commit_every=2, micro_batches=micro_batches, **values)


CONFIGURATIONS = {
    "streamed, cpu": small(),
    "streamed, virtual": small(device="virtual"),
    "some resident, cpu": small(memory="some"),
    "some resident, virtual": small(memory="some", device="virtual"),
    "all resident, virtual": small(memory="all", device="virtual"),
    "tied, cpu": small(model="qwen3"),
    "tied, virtual": small(model="qwen3", device="virtual"),
    "tied resident, virtual": small(model="qwen3", device="virtual", memory="some"),
    "deferred, gradients on ssd, cpu": small(clip="deferred", gradients="ssd"),
    "deferred, gradients on ssd, virtual": small(clip="deferred", gradients="ssd", device="virtual"),
    "deferred, some resident, virtual": small(clip="deferred", memory="some", device="virtual"),
    "speculative, streamed, cpu": small(clip="speculative"),
    "speculative, gradients on ssd, virtual": small(clip="speculative", gradients="ssd", device="virtual"),
    "speculative, some resident, virtual": small(clip="speculative", memory="some", device="virtual"),
    "speculative, always clipped, virtual": small(clip="speculative", memory="some", device="virtual"),
    "speculative, left units, virtual": small(clip="speculative", memory="some", device="virtual", left_units=2),
    "left units, streamed, cpu": small(left_units=2),
    "left units, some resident, virtual": small(left_units=2, memory="some", device="virtual"),
    "separate stage, cpu": small(strategy="separate-stage"),
    "separate stage, gradients on ssd, virtual": small(strategy="separate-stage", gradients="ssd", device="virtual"),
    "speculative, separate stage, virtual": small(
        clip="speculative", strategy="separate-stage", memory="some", device="virtual"
    ),
    "skipped, deferred, virtual": small(clip="deferred", precision="fp16 fp32", memory="some", device="virtual"),
    "skipped, speculative, virtual": small(clip="speculative", precision="fp16 fp32", memory="some", device="virtual"),
    "activations on ssd, cpu": small(activations="ssd", micro_batches=3),
    "activations on ssd, virtual": small(activations="ssd", micro_batches=3, device="virtual"),
    "activations in host memory, virtual": small(activations="host", micro_batches=3, device="virtual"),
}

MUTATIONS = {
    "speculative, separate stage, virtual": {
        "read_state s waits for write r of the step before": 2,
        "to_gpu f waits for update s of the step before": 0,
        "update s waits for write r of the step before": 0,
    },
    "streamed, cpu": {
        "backward waits for read_weights b": 0,
        "evict gradient. waits for update b": 0,
        "evict read_weights.b waits for forward of the step before": 0,
        "evict read_weights.b waits for write b": 0,
        "evict read_weights.f waits for forward": 0,
        "evict read_weights.f waits for write b": 0,
        "forward waits for read_weights f": 0,
        "norm waits for backward": 0,
        "norm waits for forward": 0,
        "read_weights b waits for write b of the step before": 2,
        "read_weights f waits for write b of the step before": 2,
        "update b waits for read_state b": 0,
        "update b waits for read_weights b": 0,
        "write b waits for update b": 0,
    },
    "streamed, virtual": {
        "act_in waits for act_out": 0,
        "act_out waits for forward": 0,
        "backward waits for act_in": 0,
        "backward waits for gradient": 0,
        "evict read_weights.b waits for to_gpu f of the step before": 0,
        "evict read_weights.f waits for to_gpu f": 0,
        "forward waits for to_gpu f": 0,
        "gradient waits for backward": 0,
        "gradient waits for forward": 0,
        "norm waits for gradient": 0,
        "to_gpu b waits for backward": 0,
        "to_gpu b waits for forward": 0,
        "to_gpu b waits for read_weights b": 0,
        "to_gpu f waits for forward": 0,
        "to_gpu f waits for read_weights f": 0,
    },
    "some resident, cpu": {
        "forward waits for update b of the step before": 0,
        "read_state b waits for write b of the step before": 0,
        "update b waits for write b of the step before": 0,
    },
    "some resident, virtual": {
        "to_gpu f waits for update b of the step before": 0,
    },
    "tied, cpu": {
        "evict read_weights.h waits for forward": 0,
        "forward waits for read_weights h": 0,
        "read_weights h waits for write b of the step before": 2,
    },
    "tied, virtual": {
        "evict read_weights.h waits for to_gpu h": 0,
        "forward waits for to_gpu h": 0,
        "to_gpu h waits for read_weights h": 0,
    },
    "deferred, gradients on ssd, cpu": {
        "evict gradient. waits for norm": 0,
        "evict gradient. waits for spill": 0,
        "evict read_gradient.u waits for update u": 0,
        "evict read_weights.b waits for backward": 0,
        "evict read_weights.u waits for forward of the step before": 0,
        "evict read_weights.u waits for write u": 0,
        "forward waits for update u of the step before": 0,
        "read_gradient u waits for spill": 0,
        "read_weights b waits for write u of the step before": 2,
        "read_weights f waits for write u of the step before": 0,
        "read_weights u waits for write u of the step before": 2,
        "spill waits for backward": 0,
        "spill waits for forward": 0,
        "update u waits for read_gradient u": 0,
        "update u waits for read_state u": 0,
        "update u waits for read_weights u": 0,
        "write u waits for update u": 0,
    },
    "deferred, gradients on ssd, virtual": {
        "evict read_weights.u waits for to_gpu f of the step before": 0,
        "spill waits for gradient": 0,
        "to_gpu f waits for update u of the step before": 0,
    },
    "deferred, some resident, virtual": {
        "evict gradient. waits for update u": 0,
        "read_state u waits for write u of the step before": 0,
        "update u waits for write u of the step before": 0,
    },
    "speculative, streamed, cpu": {
        "evict gradient. waits for update r": 0,
        "evict read_weights.r waits for write r": 0,
        "read_weights f waits for write r of the step before": 0,
        "read_weights r waits for rollback": 0,
        "update r waits for read_state r": 0,
        "update r waits for read_weights r": 0,
        "write r waits for update r": 0,
    },
    "speculative, gradients on ssd, virtual": {
        "evict read_gradient.r waits for update r": 0,
        "read_gradient r waits for spill": 0,
        "update r waits for read_gradient r": 0,
    },
    "speculative, some resident, virtual": {
        "read_state b waits for write r of the step before": 2,
        "read_state r waits for rollback": 0,
        "rollback waits for update b": 0,
        "to_gpu f waits for update r of the step before": 0,
        "update b waits for write r of the step before": 2,
        "update r waits for rollback": 0,
    },
    "separate stage, cpu": {
        "evict gradient. waits for update s": 0,
        "evict read_weights.s waits for write s": 0,
        "read_weights f waits for write s of the step before": 0,
        "update s waits for read_state s": 0,
        "update s waits for read_weights s": 0,
        "write s waits for update s": 0,
    },
    "separate stage, gradients on ssd, virtual": {
        "evict read_gradient.s waits for update s": 0,
        "read_gradient s waits for spill": 0,
        "update s waits for read_gradient s": 0,
    },
    "skipped, deferred, virtual": {
        "update u waits for write k of the step before": 0,
        "write k waits for write u of the step before": 0,
    },
    "activations on ssd, cpu": {
        "act_in waits for act_read": 0,
        "act_out waits for forward": 0,
        "act_read waits for act_write": 0,
        "act_write waits for act_out": 0,
        "backward waits for act_in": 0,
    },
    "activations on ssd, virtual": {
        "act_in waits for act_read": 0,
        "act_in waits for backward": 0,
        "act_in waits for forward": 0,
        "act_read waits for act_write": 2,
        "act_write waits for act_out": 0,
        "backward waits for act_in": 0,
        "forward waits for act_out": 0,
    },
    "activations in host memory, virtual": {
        "act_in waits for backward": 0,
        "backward waits for act_in": 0,
    },
    "skipped, speculative, virtual": {
        "read_weights f waits for rollback of the step before": 0,
        "to_gpu f waits for rollback of the step before": 0,
        "update b waits for write k of the step before": 2,
    },
}
"""Where a wait of each kind is removed, and how the race is lost there (a number in WAYS)."""

IMPLIED = {
    "read_weights s waits for write r of the step before",
    "rollback waits for update s",
    "backward waits for backward",
    "backward waits for forward",
    "backward waits for to_gpu b",
    "clip waits for norm",
    "commit waits for clip",
    "commit waits for rollback",
    "evict read_weights.b waits for to_gpu b",
    "evict read_weights.b waits for update b",
    "evict read_weights.f waits for update b",
    "evict read_weights.r waits for update r",
    "evict read_weights.s waits for update s",
    "evict read_weights.u waits for update u",
    "forward waits for forward",
    "read_gradient s waits for backward",
    "read_state b waits for rollback of the step before",
    "read_state s waits for write s of the step before",
    "read_weights b waits for rollback of the step before",
    "read_weights b waits for write r of the step before",
    "read_weights b waits for write s of the step before",
    "read_weights s waits for write s of the step before",
    "to_gpu h waits for forward",
    "to_gpu h waits for update b of the step before",
    "update b waits for backward",
    "update b waits for forward",
    "update b waits for gradient",
    "update b waits for read_weights f",
    "update r waits for write r of the step before",
    "update s waits for backward",
    "update u waits for clip",
    "write k waits for rollback",
    "write k waits for update u of the step before",
}
"""No instance of these can be lost: other waits, or the order of lanes, ensure every one. They stay in the schedule so
that it says what an operation needs; the simulator reads it too."""

_COMMIT = "the store's commit waits for every write issued before it, and the lane has issued them all"
_STAGE = "only when a separate stage may begin; nothing it reads is changed before"
GUARDED = {
    "act_read waits for act_out": "for slabs, of which there are enough here: test_schedule plays it with only one",
    "commit waits for write b": _COMMIT,
    "commit waits for write k": _COMMIT,
    "commit waits for write r": _COMMIT,
    "commit waits for write s": _COMMIT,
    "commit waits for write u": _COMMIT,
    "rollback waits for write b": "the store's rollback waits for every write issued before it, as a commit does",
    "rollback waits for write s": "the store's rollback waits for every write issued before it, as a commit does",
    "read_state s waits for backward": _STAGE,
    "read_weights s waits for backward": _STAGE,
    "read_state b waits for write k of the step before": "where state is read, such a write has weights only",
    "read_state u waits for write k of the step before": "where state is read, such a write has weights only",
}

WAYS = (
    {"patient": True},
    {"patient": False},
    {"patient": True, "in_turn": False},
)


@dataclass
class Outcome:
    numbers: list = field(default_factory=list)
    tensors: dict = field(default_factory=dict)

    def same(self, other):
        return (
            self.numbers == other.numbers
            and self.tensors.keys() == other.tensors.keys()
            and all(
                torch.equal(t.view(torch.uint8), other.tensors[n].view(torch.uint8)) for n, t in self.tensors.items()
            )
        )


def keep(outcome, run, when):
    for name, weight in run.read_weights():
        outcome.tensors[when, name] = weight.reshape(-1)
    for name, master, moments in run.read_state():
        outcome.tensors[when, name, "master"] = master.reshape(-1)
        for key, value in moments.items():
            outcome.tensors[when, name, key] = value.reshape(-1)


class Setup:
    """One configuration, ready to run again and again."""

    def __init__(self, name, models):
        case = self.case = CONFIGURATIONS[name]
        self.folder = models / f"small-{case.model}"
        if not self.folder.exists():
            zoo.tiny_model_folder(case.model, self.folder, num_hidden_layers=3, hidden_size=32, intermediate_size=64)
        self.data = parity.batches(STEPS, case.micro_batches)
        for batch, *_ in self.data:
            batch["input_ids"][:, 0] = parity.VOCABULARY - 1  # the last row of the table is the last to be updated
        self.settings = parity.training_settings(case)
        limit, self.scale = parity.look_ahead(self.folder, self.data, self.settings)
        if case.clip != "off":
            # The first two steps are clipped and the last is not: nothing makes good what went wrong in it.
            self.settings["max_grad_norm"] = limit * (0.5 if "always" in name else 0.95)

    def plan(self, model, plan):
        # So much memory that a lack of it never orders anything: only waits do.
        plan = parity.plan_of(self.case)(model, plan)
        transit = 24 if plan.transit_bytes else 0
        # Nor a barrier, behind which most waits are never needed.
        return replace(
            plan, weights_slabs=24, state_slabs=64, gradient_slabs=24, transit_slabs=transit, barrier=False,
            blocks_in_flight=0,
        )  # fmt: skip

    def run(self, directory):
        """Three steps, the second committed, an evaluation, and what a reopening finds after the third is lost."""
        case, outcome = self.case, Outcome()
        options = {
            "model": self.folder, "ssd": [directory], "host_memory": 112 << 20, "weights": [1.0], "device": case.device,
            "piece_elements": 4096, "store_files": QuickFiles(), "commit_every": case.commit_every, "versions": 3,
            "clip": "auto" if case.clip == "off" else case.clip, "strategy": case.strategy,
            "left_units": case.left_units, "activations": parity.activations_of(case), "keep_nothing_in_memory": True,
            **self.settings,
        }  # fmt: skip
        directory.mkdir(parents=True)

        class Lost(Exception):
            pass

        with parity.changed_plan(self.plan):
            try:
                with open_run(**options) as run:
                    for number, step in enumerate(self.data, 1):
                        if run._scale is not None:  # the second step overflows: the one that is committed
                            run._scale.scale = self.scale if number == 2 else self.scale / 8
                        result = run.step(step)
                        outcome.numbers += [result.loss, result.grad_norm, result.skipped]
                        if number == STEPS:
                            outcome.numbers.append(run.evaluate(step))
                    keep(outcome, run, "end")
                    raise Lost
            except Lost:
                pass
            with open_run(**options) as run:
                outcome.numbers.append(run.step_number)
                keep(outcome, run, "reopened")
        return outcome


class Recorder:
    """Patches the engine: records what is put on the lanes, and spoils one wait."""

    def __init__(self, monkeypatch):
        self.start()
        put, bind = Engine.put, Engine._bind

        def recording_put(engine, ops, begin=None):
            self.puts.append(list(ops))
            put(engine, [self._without_wait(op) for op in ops], begin)

        def holding_bind(engine, op, begin):
            return self._held(engine, op, self._with_room(engine, op, bind(engine, op, begin)))

        monkeypatch.setattr(Engine, "put", recording_put)
        monkeypatch.setattr(Engine, "_bind", holding_bind)
        monkeypatch.setattr(CpuDevice, "poisons", True)
        # That one thread computes and updates on shared cores, updates first, must not be what saves anybody here.
        init = Lanes.__init__
        monkeypatch.setattr(Lanes, "__init__", lambda lanes, *args, serves, **more: init(lanes, *args, **more))

    def start(self, spoilt=None, *, patient=True, in_turn=True):
        """`patient`: what should have waited at least waits until what it waited for could have started.

        Without `in_turn` a write that is held does not hold its lane: the drive takes its bytes late.
        """
        self.puts, self.spoilt, self._in_turn = [], spoilt, in_turn
        self._reached, self._consumer_done = threading.Event(), threading.Event()
        self._leaving = set()
        if not patient:
            self._reached.set()

    def _without_wait(self, op):
        if self.spoilt is None or op.key != self.spoilt[0]:
            return op
        return replace(op, waits=tuple(key for key in op.waits if key != self.spoilt[1]))

    def _with_room(self, engine, op, run):
        """Some waits only make room on the device: raise where more is there than the plan says."""
        plan, place = engine.plan, (op.key.unit, op.key.piece)

        def checked():
            handle = run()
            if op.key.kind == "forward" and op.key.step > 0 and engine.scheduler._tiers(op.key.unit):
                self._leaving.add(place)
            elif op.key.kind == "act_out":
                self._leaving.discard(place)
            weights = [key for key in engine._device_weights if key.phase != "h"]  # the tied table comes on top
            assert len(weights) <= plan.device_units, f"{op.key}: weights of {weights} on the device"
            assert len(engine._device_gradients) <= plan.device_units, f"{op.key}: gradients on the device"
            assert len(self._leaving) <= plan.swap_window, f"{op.key}: {self._leaving} wait to leave"
            arrived, head = len(engine.swapper._arrived), len(engine.layouts) - 1
            if op.key.kind == "act_in":  # the head's micro-batches that are still to come need their room too
                forwards = [Key(op.key.step, "forward", head, n) for n in range(engine.compute.num_micro_batches)]
                arrived += sum(not engine._tasks[key].done.is_set() for key in forwards)
            assert arrived <= plan.swap_window, f"{op.key}: {engine.swapper._arrived.keys()} here"
            return handle

        return checked if plan.separate_memory else run

    def _held(self, engine, op, run):
        if self.spoilt is None or op.key not in self.spoilt:
            return run
        reached, done = self._reached, self._consumer_done

        def consumer():
            reached.wait(HOLD_SECONDS / 2)
            try:
                handle = run()
            except BaseException:
                done.set()
                raise
            if handle is None:
                done.set()
            else:
                handle.then(lambda _: done.set())
            return handle

        def awaited():
            reached.set()
            done.wait(HOLD_SECONDS)
            return run()

        def landing_late():
            # The read is issued in its turn; its bytes come when the consumer is done.
            run().wait()
            swapped = op.key.kind == "act_read"
            memory = (engine.swapper._packed[op.key.unit, op.key.piece] if swapped else engine._buffers[op.key]).tensor
            bytes_read = memory.clone()
            memory.fill_(0xFF)
            landed = Handle(f"late {op.key.kind}")
            reached.set()

            def land():
                done.wait(HOLD_SECONDS)
                memory.copy_(bytes_read)
                landed.finish()

            threading.Thread(target=land, daemon=True).start()
            return landed

        def taken_late():
            reached.set()
            taken = Handle(f"late {op.key.kind}")

            def take():
                done.wait(HOLD_SECONDS)
                try:
                    run().then(lambda handle: taken.finish(error=handle.error))
                except BaseException as error:
                    taken.finish(error=error)

            threading.Thread(target=take, daemon=True).start()
            return taken

        if op.key == self.spoilt[0]:
            return consumer
        if op.lane in ("ssd_write", "swap_out") and op.key.kind in ASYNCHRONOUS and not self._in_turn:
            return taken_late
        return landing_late if op.key.kind in ASYNCHRONOUS and op.lane in ("ssd_read", "swap_in") else awaited


def kind_of(key, wait):
    steps = "" if key.step == wait.step else " of the step before"
    return f"{key.kind} {key.phase}".strip() + " waits for " + f"{wait.kind} {wait.phase}".strip() + steps


def waits_of(puts):
    """Every wait by its kind: (the operation, what it waits for, whether the graph implies it)."""
    graph, found = Graph(puts), defaultdict(list)
    for op in graph.ops.values():
        for wait in op.waits:
            if wait in graph.ops:
                found[kind_of(op.key, wait)].append((op.key, wait))
    return graph, found


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


_baselines = {}


def baseline(name, models, folder, recorder):
    """The configuration, what it gives when nothing is wrong, and its waits. Made once."""
    if name not in _baselines:
        setup = Setup(name, models)
        recorder.start()
        outcome = setup.run(folder / "baseline")
        _baselines[name] = setup, outcome, *waits_of(recorder.puts)
    return _baselines[name]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_kind_of_wait_is_on_a_list(name, models, folder_in_memory, recorder):
    _, _, graph, found = baseline(name, models, folder_in_memory, recorder)
    mutated = {kind for kinds in MUTATIONS.values() for kind in kinds}
    assert set(found) <= mutated | IMPLIED | GUARDED.keys(), "new waits: show that removing one is caught"
    for kind in IMPLIED & found.keys():
        for key, wait in found[kind]:
            assert graph.redundant(key, wait), f"{key} really needs its wait for {wait}"


def test_no_list_has_a_wait_that_is_gone(models, folder_in_memory, recorder):
    present = set()
    for number, name in enumerate(CONFIGURATIONS):
        present |= baseline(name, models, folder_in_memory / str(number), recorder)[3].keys()
    assert {kind for kinds in MUTATIONS.values() for kind in kinds} | IMPLIED | GUARDED.keys() == present


@pytest.mark.parametrize(
    ("name", "kind", "way"), [(name, kind, way) for name, kinds in MUTATIONS.items() for kind, way in kinds.items()]
)
def test_removing_a_wait_is_caught(name, kind, way, models, folder_in_memory, recorder):
    setup, expected, graph, found = baseline(name, models, folder_in_memory, recorder)
    needed = [pair for pair in found[kind] if not graph.redundant(*pair)]
    some = dict.fromkeys([needed[len(needed) // 2], needed[0], needed[len(needed) // 4], needed[-1]])
    for number, (key, wait) in enumerate(some):
        recorder.start((key, wait), **WAYS[way])
        try:
            if not setup.run(folder_in_memory / str(number)).same(expected):
                return
        except Exception:
            return
    pytest.fail(f"{len(some)} waits of this kind were removed and nothing was wrong, the last: {key} for {wait}")
