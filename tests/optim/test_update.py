"""The updater on stored state against torch.optim.AdamW(fused=True) with an f32 master kept beside it."""

from __future__ import annotations

import pytest
import torch

from lohan.errors import ConfigError
from lohan.optim import SGD, Adam, AdamW, Updater, bytes_per_parameter, default_format, get_format
from lohan.optim.formats import FORMATS, ArraySpec, StateFormat
from lohan.optim.rounding import round_to_wire

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOSSLESS = [("fp32", BF16), ("fp32", FP16), ("fp32", FP32), ("split", BF16)]
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}


def as_wire(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wire = torch.empty(master.numel(), dtype=dtype)
    round_to_wire(master, wire)
    return wire


def new_state(updater: Updater, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wire = torch.empty(master.numel(), dtype=updater.wire_dtype)
    state = torch.full((updater.state_bytes(master.numel()),), 0xAB, dtype=torch.uint8)
    updater.initialise(master, wire, state)
    return wire, state


def read_master(updater: Updater, wire: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    out = torch.empty(wire.numel())
    updater.read_master(wire, state, out)
    return out


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_a_state_can_be_begun_part_by_part(name, dtype):
    updater = Updater(AdamW(), get_format(name), dtype, block_elements=4096)
    master = torch.randn(20_003)
    wire, state = torch.empty(20_003, dtype=dtype), torch.full((updater.state_bytes(20_003),), 0xAB, dtype=torch.uint8)
    for start in range(0, 20_003, 4096):
        updater.initialise(master[start : start + 4096], wire, state, start)
    assert all(torch.equal(*pair) for pair in zip((wire, state), new_state(updater, master), strict=True))


def test_without_moments_a_weight_of_fp32_is_all_there_is():
    updater = Updater(SGD(), get_format("fp32"), FP32)
    out = torch.empty(5)
    updater.join_master(torch.arange(5.0), torch.empty(0, dtype=torch.uint8), out)
    assert updater.master_dtype is None
    assert torch.equal(out, torch.arange(5.0))


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_any_part_of_the_master_can_be_read(name, dtype):
    updater = Updater(AdamW(), get_format(name), dtype, block_elements=4096)
    master = torch.randn(20_003)
    wire, state = new_state(updater, master)
    size = 0 if updater.master_dtype is None else updater.master_dtype.itemsize
    for start, count in ((0, 1), (0, 4096), (77, 9000), (20_002, 1), (20_003, 0)):
        out = torch.empty(count)
        kept = state[start * size : (start + count) * size]
        updater.join_master(wire[start : start + count], kept, out)
        assert torch.equal(out, master[start : start + count])


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
@pytest.mark.parametrize("num", [1, 65, 4096, 100_003])
@pytest.mark.parametrize("multiplied", [False, True])
def test_stored_state_gives_the_bits_of_fused_adamw(name, dtype, num, multiplied):
    torch.manual_seed(num)
    start = torch.randn(num)
    updater = Updater(AdamW(), get_format(name), dtype, block_elements=4096)
    wire, state = new_state(updater, start)
    whole = torch.nn.Parameter(start.clone())
    twin = torch.optim.AdamW([whole], fused=True, **SETTINGS)
    multipliers = (1 / 65536, torch.tensor(0.3)) if multiplied else ()
    for step in range(1, 5):
        grad = torch.randn(num).to(dtype if step % 2 else FP32)  # gradients come in wire dtype or f32
        kept = grad.clone()
        updater.update(wire, state, grad, step=step, grad_multipliers=multipliers, **SETTINGS)
        assert torch.equal(grad, kept)
        whole.grad = grad.to(FP32, copy=True)
        for multiplier in multipliers:
            torch._foreach_mul_([whole.grad], torch.as_tensor(multiplier, dtype=FP32))
        twin.step()
        assert torch.equal(wire, as_wire(whole.detach(), dtype))
    assert torch.equal(read_master(updater, wire, state), whole.detach())
    moments = updater.read_moments(wire, state)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(moments[moment], twin.state[whole][moment])


@pytest.mark.parametrize("name", FORMATS)
def test_bits_do_not_depend_on_blocks_or_pieces(name):
    start, grad = torch.randn(70_001), torch.randn(70_001).to(BF16)
    seen = []
    for block, piece in [(64, 70_001), (1 << 17, 70_001), (4096, 64 * 100)]:
        updater = Updater(AdamW(), get_format(name), BF16, block_elements=block)
        masters, wires = [], []
        for at in range(0, 70_001, piece):
            wire, state = new_state(updater, start[at : at + piece])
            for step in (1, 2, 3):
                updater.update(wire, state, grad[at : at + piece], step=step, **SETTINGS)
            masters.append(read_master(updater, wire, state))
            wires.append(wire)
        seen.append((torch.cat(masters), torch.cat(wires)))
    for master, wire in seen[1:]:
        assert torch.equal(master, seen[0][0])
        assert torch.equal(wire, seen[0][1])


@pytest.mark.parametrize("optimizer", [Adam(), SGD(momentum=0.9), SGD()], ids=str)
def test_the_optimizer_is_replaceable(optimizer):
    start, grads = torch.randn(1000), torch.randn(3, 1000)
    expected, moments = start.clone(), {name: torch.zeros(1000) for name in optimizer.moments}
    updater = Updater(optimizer, get_format("split"), BF16, block_elements=64)
    wire, state = new_state(updater, start)
    for step, grad in enumerate(grads, start=1):
        optimizer.update(expected, grad, moments, step=step, **SETTINGS)
        updater.update(wire, state, grad, step=step, **SETTINGS)
    assert torch.equal(read_master(updater, wire, state), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("source", [BF16, FP32])
def test_a_new_state_holds_the_values_and_zero_moments(name, source):
    values = torch.randn(1000).to(source)
    updater = Updater(AdamW(), get_format(name), BF16)
    wire, state = new_state(updater, values)
    assert torch.equal(read_master(updater, wire, state), values.float())
    assert torch.equal(wire, as_wire(values.float(), BF16))
    assert all(not moment.any() for moment in updater.read_moments(wire, state).values())


def test_weights_already_on_the_wire_are_initialised_in_place():
    updater = Updater(AdamW(), get_format("fp32"), FP32, block_elements=64)
    wire = torch.randn(1000)
    kept = wire.clone()
    updater.initialise(wire, wire, torch.empty(updater.state_bytes(1000), dtype=torch.uint8))
    assert torch.equal(wire, kept)


def test_every_byte_of_a_new_state_is_written():
    # Uninitialised padding would give equal states different checksums.
    updater = Updater(AdamW(), get_format("split"), BF16)
    states = []
    for fill in (0, 255):
        state = torch.full((updater.state_bytes(77),), fill, dtype=torch.uint8)
        updater.initialise(torch.ones(77), torch.empty(77, dtype=BF16), state)
        states.append(state)
    assert torch.equal(*states)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num", [0, 1, 33, 4096])
def test_arrays_start_on_cache_lines_one_after_another(name, num):
    updater = Updater(AdamW(), get_format(name), BF16)
    state = torch.zeros(updater.state_bytes(num), dtype=torch.uint8)
    end = 0
    for spec in get_format(name).arrays(AdamW().moments, BF16):
        view = updater.state_views(state, num)[spec.name]
        start = view.storage_offset() * view.element_size()
        assert (view.dtype, view.numel(), start) == (spec.dtype, num, -(-end // 64) * 64)
        end = start + num * spec.dtype.itemsize
    assert end == state.numel()


@pytest.mark.parametrize(
    ("name", "wire", "expected"),
    [
        ("fp32", BF16, 12),
        ("fp32", FP16, 12),
        ("fp32", FP32, 8),
        ("split", BF16, 10),
        ("bf16-moments", BF16, 6),
        ("bf16-moments", FP16, 8),
        ("bf16-moments", FP32, 4),
    ],
)
def test_bytes_per_parameter(name, wire, expected):
    assert bytes_per_parameter(get_format(name), AdamW(), wire) == expected


def test_the_default_format_is_the_smallest_that_loses_nothing():
    assert [default_format(dtype).name for dtype in (BF16, FP16, FP32)] == ["split", "fp32", "fp32"]


def test_what_cannot_work_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match="state_format: fp32"):
        Updater(AdamW(), get_format("split"), FP16)
    with pytest.raises(ConfigError, match="fp32, split, bf16-moments"):
        get_format("int4")
    with pytest.raises(ConfigError, match="bfloat16, float16 or float32"):
        Updater(AdamW(), get_format("fp32"), torch.float64)


def test_the_wrong_tensor_is_refused():
    updater = Updater(AdamW(), get_format("split"), BF16)
    wire, state = new_state(updater, torch.ones(64))
    with pytest.raises(ValueError, match="made for"):
        updater.update(wire.float(), state, wire, step=1, **SETTINGS)
    with pytest.raises(ValueError, match="one length"):
        updater.update(wire, state, wire[:32], step=1, **SETTINGS)
    with pytest.raises(ValueError, match="bytes"):
        updater.update(wire, state[:100], wire, step=1, **SETTINGS)


def test_another_format_is_one_small_class():
    class Fp16Moments(StateFormat):
        name = "fp16-moments"

        def arrays(self, moments, wire):
            return (ArraySpec("remainder", torch.int16), *(ArraySpec(name, FP16) for name in moments))

    updater = Updater(AdamW(), Fp16Moments(), BF16)
    wire, state = new_state(updater, torch.randn(1000))
    updater.update(wire, state, torch.randn(1000), step=1, **SETTINGS)
    assert updater.state_views(state, 1000)["exp_avg"].dtype == FP16


def test_updates_allocate_no_memory_that_grows_with_the_parameter():
    updater = Updater(AdamW(), get_format("split"), BF16, block_elements=4096)
    wire, state = new_state(updater, torch.randn(1 << 20))
    grad = torch.randn(1 << 20).to(BF16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        updater.update(wire, state, grad, step=1, grad_multipliers=(0.5,), **SETTINGS)
    largest = max(abs(event.self_cpu_memory_usage) / max(1, event.count) for event in seen.key_averages())
    assert largest <= 4096 * 4
