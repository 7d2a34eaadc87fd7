"""The wire rounding and the lossless split, on every value that could go wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lohan.optim.rounding import join_master, round_to_wire, split_master

LOW_HALVES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def bits_of(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.int32).numpy().view(np.uint32)


def every_top_half(low: int) -> torch.Tensor:
    return floats((np.arange(65536, dtype=np.uint32) << 16) | low)


def reference_wire(master: torch.Tensor) -> np.ndarray:
    """Ties away from zero, in exact integers of another library. NaNs are not covered."""
    return (((bits_of(master).astype(np.uint64) + 0x8000) >> 16) & 0xFFFF).astype(np.uint16)


def wire_bits(wire: torch.Tensor) -> np.ndarray:
    return wire.view(torch.int16).numpy().view(np.uint16)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wire = torch.empty(master.numel(), dtype=torch.bfloat16)
    remainder = torch.empty(master.numel(), dtype=torch.int16)
    split_master(master, wire, remainder)
    return wire, remainder


def join(wire: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    out = torch.empty(wire.numel())
    join_master(wire, remainder, out)
    return out


@pytest.mark.parametrize("low", LOW_HALVES)
def test_every_number_rounds_to_nearest_with_ties_away_from_zero(low):
    master = every_top_half(low)
    wire = torch.empty(65536, dtype=torch.bfloat16)
    round_to_wire(master, wire)
    is_number = ~torch.isnan(master).numpy()
    np.testing.assert_array_equal(wire_bits(wire)[is_number], reference_wire(master)[is_number])


@pytest.mark.parametrize("low", LOW_HALVES)
def test_the_fast_way_without_nans_gives_the_same_wire(low):
    # All finite values of moderate size: takes the way that a NaN in the block would close.
    master = every_top_half(low)
    master = master[master.abs() < 1e15].contiguous()
    wire = torch.empty(master.numel(), dtype=torch.bfloat16)
    round_to_wire(master, wire)
    np.testing.assert_array_equal(wire_bits(wire), reference_wire(master))


@pytest.mark.parametrize("low", LOW_HALVES)
def test_every_number_survives_the_split_to_the_bit(low):
    master = every_top_half(low)
    back = join(*split(master))
    is_number = ~torch.isnan(master).numpy()
    np.testing.assert_array_equal(bits_of(back)[is_number], bits_of(master)[is_number])


@pytest.mark.parametrize("low", LOW_HALVES)
def test_every_nan_stays_a_nan_on_the_wire_and_when_joined(low):
    master = every_top_half(low)
    nans = master[torch.isnan(master)].contiguous()
    wire, remainder = split(nans)
    assert torch.isnan(wire).all()
    assert torch.isnan(join(wire, remainder)).all()


def test_the_nan_that_arithmetic_makes_keeps_its_bits():
    master = floats(np.array([0x7FC00000, 0xFFC00000]))
    np.testing.assert_array_equal(bits_of(join(*split(master))), bits_of(master))


@pytest.mark.parametrize("position", [0, 1, 31, 4096, 4098])
def test_one_nan_anywhere_in_a_block_is_found(position):
    master = torch.randn(4099)
    expected = torch.empty(4099, dtype=torch.bfloat16)
    round_to_wire(master, expected)
    master[position] = floats(np.array([0x7F800001]))[0]  # the NaN that plain rounding turns into infinity
    wire = torch.empty(4099, dtype=torch.bfloat16)
    round_to_wire(master, wire)
    assert torch.isnan(wire[position])
    others = torch.arange(4099) != position
    assert torch.equal(wire[others], expected[others])


@pytest.mark.parametrize(
    ("bits", "wire"),
    [
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),
        (0x7F800000, 0x7F80),  # infinity
        (0xFF800000, 0xFF80),
        (0x7F7FFFFF, 0x7F80),  # the largest float rounds to infinity
        (0x7F7F7FFF, 0x7F7F),
        (0x00000001, 0x0000),  # the smallest denormal
        (0x00008000, 0x0001),
        (0x80008000, 0x8001),
        (0x3F808000, 0x3F81),  # a tie that torch's own rounding sends down
    ],
)
def test_the_corners(bits, wire):
    master = floats(np.array([bits]))
    got, remainder = split(master)
    assert wire_bits(got)[0] == wire
    assert bits_of(join(got, remainder))[0] == bits


def test_all_65536_wires_with_all_remainders_join_as_the_formula_says():
    wires = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for remainder in (-32768, -32767, -1, 0, 1, 32767):
        out = join(wires.view(torch.bfloat16), torch.full((65536,), remainder, dtype=torch.int16))
        expected = (wires.numpy().astype(np.int64) * 65536 + remainder) & 0xFFFFFFFF
        np.testing.assert_array_equal(bits_of(out), expected.astype(np.uint32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_any_bits_come_back(bits):
    master = floats(np.array(bits, dtype=np.uint64))
    wire, remainder = split(master)
    back = join(wire, remainder)
    is_number = ~torch.isnan(master).numpy()
    np.testing.assert_array_equal(wire_bits(wire)[is_number], reference_wire(master)[is_number])
    np.testing.assert_array_equal(bits_of(back)[is_number], bits_of(master)[is_number])
    assert torch.equal(torch.isnan(wire), torch.isnan(master))
    assert torch.equal(torch.isnan(back), torch.isnan(master))


def test_scratch_may_be_the_master_itself():
    master = torch.randn(1000)
    expected_wire, expected_remainder = split(master)
    wire, remainder = torch.empty_like(expected_wire), torch.empty_like(expected_remainder)
    split_master(master, wire, remainder, master.view(torch.int32))
    assert torch.equal(wire, expected_wire)
    assert torch.equal(remainder, expected_remainder)


def test_other_wires_are_torchs_own_conversion():
    master = torch.cat([torch.randn(100), torch.tensor([torch.inf, -torch.inf, 1e6, 1e-8, 0.0])])
    for dtype in (torch.float16, torch.float32):
        out = torch.empty(master.numel(), dtype=dtype)
        round_to_wire(master, out)
        assert torch.equal(out, master.to(dtype))
