"""LoHan as published: its time model, and the activations that model sends off the device.

    T_f = max(F/THP, A/BWg, 2P/BWg, 2P/S2M + aA/M2S)
    T_b = max((2F + R)/THP, (2P + A)/BWg, 2P/BWg, (14P + aA)/S2M + 14P/M2S)
    T   = T_f + T_b            aA = max(0, A - RAM_free)

A is at least the inputs of all blocks. More is added operator by operator in decreasing offloading benefit, FLOPs
saved per byte moved; RAM first, the rest to SSD. Of all these choices the fastest by T is taken, of equals the first.
Operators whose outputs backward does not need are neither moved nor recomputed. The model knows neither the CPU's
update nor other host work: the simulator adds those.

`flowing` is the same choice where nothing separates forward from backward, so that every lane has the whole step:

    T = max((3F + R)/THP, (4P + A)/BWg, (2P + A)/BWg, (16P + aA)/S2M + (14P + aA)/M2S)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lohan.plan.activations import recompute_flops
from lohan.plan.drives import drive_rates
from lohan.profiles import MachineProfile, ModelProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperChoice:
    """What leaves the device and what is computed again, for a whole step on one device."""

    activation_bytes: float
    """A."""

    ssd_bytes: float
    """aA: of A, what RAM cannot hold."""

    recompute_flops: float
    """R."""

    forward_seconds: float
    backward_seconds: float
    inputs: tuple[str, ...]
    """For each unit, where its input waits: as `Plan.inputs`."""

    kept: tuple[tuple[tuple[int, str], ...], ...]
    """For each unit, the operators that are kept and where: as `Plan.kept`."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def choose_activations(
    profile: ModelProfile, machine: MachineProfile, *, free_host_bytes: float, flowing: bool = False
) -> PaperChoice:
    """The published choice for a step of one micro-batch, the profile's."""
    blocks = [number for number, unit in enumerate(profile.units) if unit.kind == "block"]
    activation = float(sum(profile.units[number].input_bytes for number in blocks))
    recompute = sum(recompute_flops(profile.units[number].operators, ()) for number in blocks)
    candidates = [
        (operator.flops / operator.output_bytes, -block, -place)
        for block in blocks
        for place, operator in enumerate(profile.units[block].operators)
        if operator.needed and operator.output_bytes
    ]
    best_count, best = 0, _times(profile, machine, activation, recompute, free_host_bytes, flowing)
    best_activation, best_recompute = activation, recompute
    order = sorted(candidates, reverse=True)
    for count, (_, block, place) in enumerate(order, 1):
        operator = profile.units[-block].operators[-place]
        activation += operator.output_bytes
        recompute = max(0.0, recompute - operator.flops)
        times = _times(profile, machine, activation, recompute, free_host_bytes, flowing)
        if sum(times) < sum(best) * (1 - 1e-9):
            best_count, best, best_activation, best_recompute = count, times, activation, recompute
    inputs, kept = _place(profile, [(-block, -place) for _, block, place in order[:best_count]], free_host_bytes)
    return PaperChoice(
        activation_bytes=best_activation,
        ssd_bytes=max(0.0, best_activation - free_host_bytes),
        recompute_flops=best_recompute,
        forward_seconds=best[0],
        backward_seconds=best[1],
        inputs=inputs,
        kept=kept,
    )


def _place(
    profile: ModelProfile, chosen: Sequence[tuple[int, int]], free: float
) -> tuple[tuple[str, ...], tuple[tuple[tuple[int, str], ...], ...]]:
    """RAM first, in the order of choice; the rest to SSD."""

    def tier(num_bytes: int) -> str:
        nonlocal free
        free -= num_bytes
        return "host" if free >= 0 else "ssd"

    inputs = tuple(tier(unit.input_bytes) if unit.kind == "block" else "device" for unit in profile.units)
    kept: list[list[tuple[int, str]]] = [[] for _ in profile.units]
    for block, place in chosen:
        kept[block].append((place, tier(profile.units[block].operators[place].output_bytes)))
    return inputs, tuple(tuple(sorted(one)) for one in kept)


def _times(
    profile: ModelProfile,
    machine: MachineProfile,
    activation: float,
    recompute: float,
    free_host_bytes: float,
    flowing: bool,
) -> tuple[float, float]:
    """T_f and T_b; flowing, what T leaves for T_b."""
    parameters = profile.num_parameters
    forward_flops = sum(unit.forward_flops for unit in profile.units)
    flops = machine.gpu_flops_per_second
    link = min(machine.to_gpu_bytes_per_second, machine.to_host_bytes_per_second)
    drives = drive_rates(machine.drives, machine.array_bytes_per_second)
    ssd = max(0.0, activation - free_host_bytes)
    forward = max(
        forward_flops / flops,
        activation / link,
        2 * parameters / link,
        2 * parameters / drives.read + ssd / drives.write,
    )
    backward = max(
        (2 * forward_flops + recompute) / flops,
        (2 * parameters + activation) / link,
        2 * parameters / link,
        (14 * parameters + ssd) / drives.read + 14 * parameters / drives.write,
    )
    if flowing:
        whole = max(
            (3 * forward_flops + recompute) / flops,
            (4 * parameters + activation) / link,
            (16 * parameters + ssd) / drives.read + (14 * parameters + ssd) / drives.write,
        )
        return forward, whole - forward
    return forward, backward
