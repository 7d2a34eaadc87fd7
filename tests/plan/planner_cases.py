"""Small models and machines to plan for."""

from dataclasses import replace

from hypothesis import strategies as st

from lohan.plan.memory import Budgets
from lohan.presets import Shape, profile_shape
from lohan.profiles import DriveProfile, MachineProfile


def small_profile(layers=3, hidden=256, *, tied=False, gated=False, sequence=256):
    shape = Shape(
        layers=layers, hidden=hidden, heads=4, kv_heads=4, head_size=hidden // 4, intermediate=4 * hidden,
        vocabulary=2000, gated=gated, tied=tied,
    )  # fmt: skip
    return profile_shape(shape, name="small", micro_batch_size=1, sequence_length=sequence)


MACHINE = MachineProfile(
    name="small",
    gpu_flops_per_second=5e12,
    gpu_memory_bytes=10**9,
    to_gpu_bytes_per_second=5e9,
    to_host_bytes_per_second=5e9,
    host_memory_bytes=150 * 10**6,
    drives=(DriveProfile(read_bytes_per_second=2e9, write_bytes_per_second=1e9),),
    update_parameters_per_second=1e9,
)


def budgets(machine):
    """All of it: nothing is left to a driver."""
    return Budgets(gpu_bytes=machine.gpu_memory_bytes, host_bytes=machine.host_memory_bytes)


profiles = st.builds(
    small_profile, st.integers(1, 4), st.sampled_from([128, 256]), tied=st.booleans(), gated=st.booleans(),
    sequence=st.sampled_from([128, 512]),
)  # fmt: skip


def _rate(low, high):
    """Of any order of magnitude between the two."""
    return st.floats(low, high).map(lambda exponent: 10**exponent)


@st.composite
def machines(draw, separate=None):
    drive = DriveProfile(read_bytes_per_second=draw(_rate(8.5, 10)), write_bytes_per_second=draw(_rate(8.5, 10)))
    return replace(
        MACHINE,
        gpu_flops_per_second=draw(_rate(12, 14)),
        to_gpu_bytes_per_second=draw(_rate(8.5, 10.5)),
        to_host_bytes_per_second=draw(_rate(8.5, 10.5)),
        update_parameters_per_second=draw(_rate(8, 9.5)),
        gpu_memory_bytes=int(draw(_rate(7.6, 8.5))),
        host_memory_bytes=int(draw(_rate(7.97, 8.6))),
        drives=(drive,) * draw(st.integers(1, 3)),
        separate_memory=draw(st.booleans()) if separate is None else separate,
    )
