"""What holds for every schedule, whatever the model, the plan and the way steps end."""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_graph import ASYNCHRONOUS, Graph

from lohan.plan.fit import HostBudget, Wishes, fit_plan, staging_bytes
from lohan.plan.plan import ModelSize, Plan, UnitSize
from lohan.plan.schedule import Key, Scheduler

PAGE = 4096


def unit_size(kind, pieces):
    """`pieces`: for each, whether it is trained."""
    return UnitSize(
        kind=kind,
        weights_bytes=PAGE * len(pieces),
        piece_weights_bytes=(PAGE,) * len(pieces),
        state_bytes=tuple(5 * PAGE if trained else 0 for trained in pieces),
        num_parameters=1000 * len(pieces),
        forward_flops=1.0,
    )


pieces = st.lists(st.booleans(), min_size=1, max_size=3)
model_sizes = st.builds(
    lambda embedding, blocks, head, tied: ModelSize(
        (unit_size("embedding", embedding), *(unit_size("block", b) for b in blocks), unit_size("head", head)), tied
    ),
    pieces,
    st.lists(pieces, min_size=1, max_size=4),
    st.one_of(pieces, st.just([])),  # a tied head may have nothing of its own
    st.booleans(),
).filter(lambda model: any(unit.trained_pieces for unit in model.units))


tiers = st.sampled_from(["device", "host", "ssd"])


@st.composite
def models_and_plans(draw):
    """A model and any plan for it, with the least slabs that fit_plan would ever give."""
    model = draw(model_sizes)
    units = range(len(model.units))
    empty = {u for u in units if not model.units[u].weights_bytes}
    state = draw(st.sets(st.sampled_from(list(units)))) | empty
    weights = draw(st.sets(st.sampled_from(list(units)))) | state
    separate = draw(st.booleans())
    plan = Plan(
        separate_memory=separate,
        inputs=tuple(draw(tiers) for _ in units),
        kept=tuple(((0, draw(tiers)),) if draw(st.booleans()) else () for _ in units),
        transit_slabs=1,
        transit_bytes=PAGE,
        swap_window=draw(st.integers(1, 3)),
        device_units=draw(st.integers(1, 2)),
        resident_weights=frozenset(weights),
        resident_state=frozenset(state),
        clip=draw(st.sampled_from(["immediate", "deferred", "speculative"])),
        left_units=frozenset(draw(st.sets(st.sampled_from(list(units)[1:])))),
        separate_stage=draw(st.booleans()),
        barrier=draw(st.booleans()),
        device_waits=draw(st.booleans()),
        blocks_in_flight=(blocks_in_flight := draw(st.integers(0, 2))),
        weights_slabs=3,
        state_slabs=max(2, blocks_in_flight * 3),
        gradient_slabs=2,
    )
    if any(plan.holds_gradient(u) for u in units):
        on_ssd = draw(st.booleans())
        trained = sum(1 for unit in model.units if unit.trained_pieces)
        plan = replace(plan, gradients_on_ssd=on_ssd, gradient_slabs=3 if on_ssd else trained + 1)
    return model, plan


stories = st.lists(
    st.tuples(st.booleans(), st.sampled_from(["kept", "kept", "redone", "skipped"]), st.booleans(), st.integers(1, 3)),
    min_size=1,
    max_size=4,
)
"""For each step: whether it is committed, how it ends, whether an evaluation follows, and its micro-batches."""


def tell(model, plan, story):
    """What a run puts on the lanes, call by call, and how often each step's pieces must be updated."""
    scheduler, puts, expected = Scheduler(model, plan), [], {}
    for step, (commit, end, evaluate, micro_batches) in enumerate(story, 1):
        puts.append(scheduler.step(step, commit=commit, micro_batches=micro_batches))
        expected[step] = 1
        if plan.clip == "speculative":
            puts.append(scheduler.settle(step, redo=end == "redone", skip=end == "skipped"))
        elif plan.clip == "deferred" and end == "skipped":
            puts.append(scheduler.skip())
            expected[step] = 0
        if evaluate:
            puts.append(scheduler.drain())
            puts.append(scheduler.evaluate(-step, micro_batches=2))
    puts.append(scheduler.drain())
    return puts, expected


@given(models_and_plans(), stories)
@settings(max_examples=150, deadline=None)
def test_every_wait_is_for_something_put_before_and_no_name_is_used_twice(both, story):
    seen = set()
    for ops in tell(*both, story)[0]:
        for op in ops:
            assert op.key not in seen
            assert seen.issuperset(op.waits)
            seen.add(op.key)


@given(models_and_plans(), stories)
@settings(max_examples=150, deadline=None)
def test_every_buffer_is_filled_before_and_given_back_after_all_its_uses_exactly_once(both, story):
    model, plan = both
    graph = Graph(tell(model, plan, story)[0])
    filled = {key for key in graph.ops if key.kind in ("read_weights", "read_gradient", "gradient")}
    made_by = {key: key for key in filled}
    if not plan.separate_memory:  # there a gradient is made where it stays
        head = len(model.units) - 1
        for op in graph.ops.values():
            if op.gradient is not None and op.gradient.kind == "gradient":
                unit, last = op.gradient.unit, story[op.gradient.step - 1][3] - 1
                made_by[op.gradient] = Key(op.gradient.step, "forward" if unit == head else "backward", unit, last)
    evicted = [op for op in graph.ops.values() if op.key.kind == "evict"]
    assert Counter(op.source for op in evicted) == Counter(made_by.keys())
    evict_of = {op.source: op.key for op in evicted}
    for op in graph.ops.values():
        for buffer in (op.source, op.gradient):
            if buffer is None or op.key.kind == "evict":
                continue
            if plan.separate_memory and op.key.kind in ("forward", "backward"):
                continue  # they use the copy on the device
            if op.key.kind != "backward" or model.units[op.key.unit].kind == "block":  # an embedding's needs no weights
                assert graph.ordered(made_by[buffer], op.key), (op.key, buffer)
            assert graph.ordered(op.key, evict_of[buffer]), (op.key, buffer)


@given(models_and_plans(), stories)
@settings(max_examples=150, deadline=None)
def test_every_trained_piece_is_updated_once_per_step_and_once_more_when_redone(both, story):
    model, plan = both
    puts, expected = tell(model, plan, story)
    updates = Counter((op.key.step, op.key.unit, op.key.piece) for ops in puts for op in ops if op.key.kind == "update")
    for step, (_, end, _, _) in enumerate(story, 1):
        for unit, size in enumerate(model.units):
            for piece in range(len(size.state_bytes)):
                wanted = expected[step] if piece in size.trained_pieces else 0
                if plan.clip == "speculative" and wanted:
                    again = 0 if plan.leaves(unit) else 1
                    wanted = {"kept": 1, "redone": 1 + again, "skipped": again}[end]
                assert updates[step, unit, piece] == wanted


@given(models_and_plans(), stories)
@settings(max_examples=100, deadline=None)
def test_weights_cross_to_the_device_once_in_forward_and_once_in_backward(both, story):
    model, plan = both
    ops = [op for ops in tell(model, plan, story)[0] for op in ops]
    crossed = Counter((op.key.step, op.key.unit, op.key.phase) for op in ops if op.key.kind == "to_gpu")
    computed = Counter((op.key.step, op.key.kind, op.key.unit) for op in ops if op.key.kind in ("forward", "backward"))
    for step in range(1, len(story) + 1):
        for unit, size in enumerate(model.units):
            micro_batches = story[step - 1][3]
            assert computed[step, "forward", unit] == micro_batches
            assert computed[step, "backward", unit] == (micro_batches if unit != len(model.units) - 1 else 0)
            if plan.separate_memory:
                assert crossed[step, unit, "f"] == 1
                assert crossed[step, unit, "b"] == (size.kind == "block")


@given(models_and_plans(), stories)
@settings(max_examples=100, deadline=None)
def test_every_commit_comes_once_and_after_all_writes_of_its_step(both, story):
    model, plan = both
    graph = Graph(tell(model, plan, story)[0])
    for step, (commit, _, _, _) in enumerate(story, 1):
        key = Key(step, "commit")
        assert (key in graph.ops) == commit
        assert Key(step, "begin") in graph.ops
        for op in graph.ops.values():
            if commit and op.key.kind == "write" and op.key.step == step:
                assert graph.ordered(op.key, key)
    begins_and_ends = [k for k in graph.ops if k.kind in ("begin", "commit", "write", "rollback")]
    now = 0
    for key in begins_and_ends:  # on one lane, so in this order
        now = key.step if key.kind == "begin" else now
        assert key.step == now, f"{key} after step {now} has begun"


def touched(op, model, plan):
    """(place, whether it is changed) for resident memory and for the records of the store."""
    key, units = op.key, model.units
    resident, state = key.unit in plan.resident_weights, key.unit in plan.resident_state
    weights = [("weights", key.unit, p) for p in units[key.unit].trained_pieces] if key.unit >= 0 else []
    if key.kind in ("to_gpu", "forward", "backward") and resident and op.source is None:
        reads = key.kind == "to_gpu" or not plan.separate_memory
        if key.kind == "backward" and units[key.unit].kind == "embedding":
            reads = False
        for place in weights if reads else []:
            yield place, False
    elif key.kind == "update":
        if resident:
            yield ("weights", key.unit, key.piece), True
        if state:
            yield ("state", key.unit, key.piece), True
    elif key.kind == "write":
        if resident:
            yield ("weights", key.unit, key.piece), False
        else:
            yield ("weights record", key.unit, key.piece), True
        if state:
            yield ("state", key.unit, key.piece), False
        elif key.phase != "k":
            yield ("state record", key.unit, key.piece), True
    elif key.kind == "read_weights":
        for _, unit, piece in weights:
            yield ("weights record", unit, piece), False
    elif key.kind == "read_state":
        yield ("state record", key.unit, key.piece), False
    elif key.kind == "rollback":
        for unit, size in enumerate(units):
            for piece in () if plan.leaves(unit) else size.trained_pieces:
                yield ("weights" if unit in plan.resident_weights else "weights record", unit, piece), True
                yield ("state" if unit in plan.resident_state else "state record", unit, piece), True


@given(models_and_plans(), stories)
@settings(max_examples=120, deadline=None)
def test_whoever_changes_memory_or_a_record_is_ordered_with_all_others_who_touch_it(both, story):
    model, plan = both
    puts = tell(model, plan, story)[0]
    graph, places = Graph(puts), defaultdict(list)
    for op in graph.ops.values():
        for place, changes in touched(op, model, plan):
            places[place].append((op.key, changes))
    for place, uses in places.items():
        changed = None
        since = []
        for key, changes in uses:
            if changed is not None:
                assert graph.ordered(changed, key), f"{place}: {changed} and {key}"
            if changes:
                for other in since:
                    assert graph.ordered(other, key), f"{place}: {other} and {key}"
                changed, since = key, []
            else:
                since.append(key)


class Stuck(Exception):
    pass


def play(model, plan, puts, rng):
    """Run a schedule with the plan's slabs, every operation taking a random time. Raises if nothing can go on."""
    head = len(model.units) - 1
    free = {"weights": plan.weights_slabs, "state": plan.state_slabs, "gradient": plan.gradient_slabs}
    free["transit"] = plan.transit_slabs
    last_of = {}
    for op in (op for ops in puts for op in ops if op.key.kind in ("forward", "backward")):
        last_of[op.key.step, op.key.kind, op.key.unit] = op.key.piece
    lanes, waiting, running, done = defaultdict(list), [], [], set()

    def takes(op):
        kind, unit = op.key.kind, op.key.unit
        if kind in ("read_weights", "read_state"):
            return kind.removeprefix("read_")
        if kind == "act_read" or (kind == "act_out" and goes_to_ssd(op)):
            return "transit"
        trained = unit >= 0 and model.units[unit].trained_pieces
        made_here = kind == "backward" or (kind == "forward" and unit == head and op.key.step > 0)
        made_here = made_here and op.key.piece == last_of[op.key.step, kind, unit]
        if kind in ("gradient", "read_gradient") or (made_here and trained and not plan.separate_memory):
            return "gradient"
        return None

    def goes_to_ssd(op):
        return model.units[op.key.unit].kind == "block" and "ssd" in plan.tiers(op.key.unit)

    def gives(op):
        if op.key.kind == "evict":
            return "weights" if op.source.kind == "read_weights" else "gradient"
        if op.key.kind == "act_write" or (op.key.kind == "act_in" and plan.separate_memory and goes_to_ssd(op)):
            return "transit"
        if op.key.kind == "backward" and not plan.separate_memory and goes_to_ssd(op):
            return "transit"
        if op.key.kind == "write" and op.key.phase != "k" and op.key.unit not in plan.resident_state:
            return "state"
        return None

    def finish(op):
        done.add(op.key)
        if gives(op) is not None:
            free[gives(op)] += 1

    last_clip = None
    busy = set()
    for number, ops in enumerate([*puts, None]):
        while True:
            for op in [o for o in waiting if done.issuperset(o.waits)]:
                waiting.remove(op)
                finish(op)
            choices = [("end", op) for op in running]
            for lane, queue in lanes.items():
                if not queue or lane in busy or not done.issuperset(queue[0].waits):
                    continue
                if takes(queue[0]) is None or free[takes(queue[0])]:
                    choices.append(("start", queue[0]))
            if ops is not None and (last_clip is None or last_clip in done):
                break
            if not choices:
                if any(lanes.values()) or waiting or running:
                    raise Stuck(f"put {number}: {[q[0].key for q in lanes.values() if q]} with {free}")
                return
            what, op = rng.choice(choices)
            if what == "end":
                running.remove(op)
                busy.discard(op.lane if op.key.kind not in ASYNCHRONOUS else None)
                finish(op)
                continue
            lanes[op.lane].pop(0)
            if takes(op) is not None:
                free[takes(op)] -= 1
            running.append(op)
            if op.key.kind not in ASYNCHRONOUS:
                busy.add(op.lane)
        for op in ops:
            (lanes[op.lane] if op.lane else waiting).append(op)
        clips = [op.key for op in ops if op.key.kind == "clip"]
        last_clip = clips[0] if clips else last_clip


@given(models_and_plans(), stories)
@settings(max_examples=100, deadline=None)
def test_behind_a_barrier_nothing_of_a_step_starts_before_everything_of_the_one_before_is_done(both, story):
    model, plan = both
    puts = tell(model, replace(plan, barrier=True), story)[0]
    graph = Graph(puts)
    for ops in puts:
        barrier = next((number for number, op in enumerate(ops) if op.key.kind == "barrier"), None)
        if barrier is None:
            continue
        step = ops[barrier].key.step
        early = [key for key in graph.ops if key.step < step and key.kind in ("update", "write", "commit")]
        for op in ops[barrier + 1 :]:
            if op.lane:
                assert all(graph.ordered(key, op.key) for key in early if key.step > 0)


@given(models_and_plans(), stories)
@settings(max_examples=100, deadline=None)
def test_with_blocks_in_flight_a_unit_is_read_whole_updated_and_written_before_one_too_many_is_read(both, story):
    model, plan = both
    graph = Graph(tell(model, replace(plan, blocks_in_flight=1), story)[0])
    previous = None
    for key in [key for key in graph.ops if key.kind == "update"]:
        unit = key._replace(kind="", piece=-1)
        of = {
            kind: [k for k in graph.ops if k.kind == kind and k._replace(kind="", piece=-1) == unit]
            for kind in ("read_state", "update", "write")
        }
        assert all(graph.ordered(read, key) for read in of["read_state"])
        assert all(graph.ordered(key, write) for write in of["write"])
        if previous is not None and previous != unit:
            ends = [k for k in graph.ops if k.kind == "write" and k._replace(kind="", piece=-1) == previous]
            assert all(graph.ordered(end, read) for end in ends for read in of["read_state"])
        previous = unit


@given(models_and_plans(), stories)
@settings(max_examples=100, deadline=None)
def test_a_device_that_waits_computes_no_unit_before_the_one_above_is_updated(both, story):
    model, plan = both
    graph = Graph(tell(model, replace(plan, device_waits=True), story)[0])
    for key in [key for key in graph.ops if key.kind == "update" and key.phase == "b" and key.unit > 0]:
        assert graph.ordered(key, Key(key.step, "backward", key.unit - 1, 0))
        gradient = Key(key.step, "gradient", key.unit)
        for read in [k for k in graph.ops if k == key._replace(kind="read_state")]:
            assert gradient not in graph.ops or graph.ordered(gradient, read)


@given(models_and_plans(), stories, st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_no_timing_brings_a_run_to_a_standstill_with_the_fewest_slabs(both, story, seed):
    model, plan = both
    play(model, plan, tell(model, plan, story)[0], random.Random(seed))


def test_the_game_notices_a_standstill():
    """Otherwise the test above means nothing: one weights slab is too few for a tied head."""
    model = ModelSize(tuple(unit_size(kind, [True]) for kind in ("embedding", "block", "head")), tied=True)
    plan = Plan(weights_slabs=1, state_slabs=2, gradient_slabs=2)
    with pytest.raises(Stuck):
        play(model, plan, tell(model, plan, [(True, "kept", False, 1)])[0], random.Random(0))


@given(model_sizes, st.integers(0, 60), st.sampled_from(["none", "deferred", "speculative", "auto"]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_fitted_plan_keeps_to_its_budget_and_never_has_fewer_slabs_than_tested_here(model, pages, clip, separate):
    budget = HostBudget(total=100 * PAGE + pages * 8 * PAGE, compute=0)
    wishes = Wishes(separate_memory=separate, clip=clip, versions=3, commit_every=1)
    plan = fit_plan(model, budget, wishes)
    assert staging_bytes(model, plan) <= budget.total
    assert plan.weights_slabs >= 3
    assert plan.state_slabs >= 2
    assert plan.gradient_slabs >= 2


def test_the_next_forward_has_the_embedding_from_its_update_unless_something_came_between():
    model = ModelSize(tuple(unit_size(kind, [True]) for kind in ("embedding", "block", "head")))
    read, update = Key(2, "read_weights", 0, -1, "f"), Key(1, "update", 0, 0, "b")

    def second_step(between=lambda scheduler: [], **plan):
        scheduler = Scheduler(model, Plan(**plan))
        earlier = [*scheduler.step(1, commit=True), *between(scheduler)]
        ops = {op.key: op for op in [*earlier, *scheduler.step(2, commit=True)]}
        return ops, ops[Key(2, "forward", 0, 0)]

    ops, forward = second_step()
    assert read not in ops
    assert update in forward.waits
    assert forward.source == Key(1, "read_weights", 0, -1, "b")
    for between in (lambda s: s.drain(), lambda s: s.evaluate(-1)):
        ops, forward = second_step(between)
        assert forward.source == read
        assert forward.waits == (read,)
    assert second_step(barrier=True)[1].source == read
    redone = second_step(lambda s: s.settle(1, redo=True, skip=False), clip="speculative")
    assert redone[1].source == read
