"""Small models, plans and machines to simulate, and what holds of a timeline whatever they are."""

from collections import defaultdict
from dataclasses import replace

from hypothesis import strategies as st

from lohan.plan.plan import ModelSize, Plan, UnitSize
from lohan.profiles import DriveProfile, MachineProfile, OperatorProfile

MACHINE = MachineProfile(
    name="small",
    gpu_flops_per_second=1e12,
    gpu_memory_bytes=10**9,
    to_gpu_bytes_per_second=2e9,
    to_host_bytes_per_second=2e9,
    host_memory_bytes=10**10,
    drives=(DriveProfile(read_bytes_per_second=1e9, write_bytes_per_second=0.5e9),),
    update_parameters_per_second=5e8,
)
OPERATORS = (
    OperatorProfile(name="a", flops=4e8, output_bytes=3000, needed=True),
    OperatorProfile(name="b", flops=6e8, output_bytes=7000, needed=True, inputs=(0,)),
)


def unit_size(kind, pieces, *, flops=1e9):
    return UnitSize(
        kind=kind,
        weights_bytes=2_000_000 * pieces,
        piece_weights_bytes=(2_000_000,) * pieces,
        state_bytes=(12_000_000,) * pieces,
        num_parameters=1_000_000 * pieces,
        forward_flops=flops,
        input_bytes=50_000 if kind == "block" else 0,
        operators=OPERATORS if kind == "block" else (),
    )


def model_size(blocks=3, pieces=2, *, tied=False, flops=1e9):
    block = unit_size("block", pieces, flops=flops)
    return ModelSize((unit_size("embedding", pieces), *[block] * blocks, unit_size("head", pieces)), tied)


@st.composite
def models_and_plans(draw):
    """A model and a plan for it, with the least slabs that cannot stand still."""
    model = model_size(
        draw(st.integers(1, 5)), draw(st.integers(1, 3)), tied=draw(st.booleans()), flops=draw(st.floats(1e6, 1e11))
    )
    units = range(len(model.units))
    state = draw(st.sets(st.sampled_from(list(units))))
    weights = draw(st.sets(st.sampled_from(list(units)))) | state
    separate = draw(st.booleans())
    tiers = st.sampled_from(["device", "host", "ssd"])
    blocks = [unit.kind == "block" for unit in model.units]
    plan = Plan(
        separate_memory=separate,
        inputs=tuple(draw(tiers) if block else "device" for block in blocks),
        kept=tuple(((1, draw(tiers)),) if block else () for block in blocks),
        transit_slabs=4,
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
        plan = replace(plan, gradients_on_ssd=on_ssd, gradient_slabs=3 if on_ssd else len(units) + 1)
    return model, plan


rates = st.floats(1e7, 1e11)
machines = st.builds(
    lambda flops, to_gpu, to_host, duplex, read, write, mixed, array, update, hashed, overhead: replace(
        MACHINE,
        gpu_flops_per_second=flops,
        to_gpu_bytes_per_second=to_gpu,
        to_host_bytes_per_second=to_host,
        duplex_share=duplex,
        drives=tuple(
            DriveProfile(read_bytes_per_second=r, write_bytes_per_second=w, mixed_bytes_per_second=m)
            for r, w, m in zip(read, write, mixed, strict=True)
        ),
        array_bytes_per_second=array,
        update_parameters_per_second=update,
        checksum_bytes_per_second=hashed,
        op_seconds=overhead,
    ),
    st.floats(1e9, 1e14),
    rates,
    rates,
    st.floats(0.5, 1.0),
    st.tuples(rates, rates),
    st.tuples(rates, rates),
    st.tuples(st.none() | rates, st.none() | rates),
    st.none() | rates,
    st.floats(1e7, 1e10),
    st.none() | st.floats(1e9, 1e11),
    st.sampled_from([0.0, 1e-5, 1e-3]),
)


def machine_for(machine, plan):
    return replace(machine, separate_memory=plan.separate_memory)


def by_lane(timeline):
    """Operations of each lane in the order of the schedule: (service, end, start, op)."""
    lanes = defaultdict(list)
    for op, start, service, end in zip(timeline.ops, timeline.start, timeline.service, timeline.end, strict=True):
        if op.lane:
            lanes[op.lane].append((service, end, start, op))
    return lanes
