"""How close does the simulator come to what LoHan's authors and their baselines measured?

    python benchmarks/published.py [--all] [--blocks-in-flight 1]

Three constants of the published system are calibrated on every second of its rows, and the rows between are predicted:

    gpu_share         of a resident block's 160 TFLOPS, what compute reaches while everything else moves
    host work         parameters per second: the CPU's update and the copies and casts around it
    exchange          bytes per second at which several GPUs' gradients are summed in host memory

zero-infinity has two of its own (gpu_share, drive_share), zero-offload one (gpu_share); the two ablations of LoHan have
none. Which models fit is a matter of lohan.sim.memory, without any constant from here. Constants minimise the mean
absolute error of the rows they are calibrated on, over a fixed grid. colossal-ai is not simulated. --all calibrates on
all rows instead, for comparison. --blocks-in-flight is the one structural assumption: how many blocks' state the
published system has in host memory at once. Takes about a minute. The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from lohan.hardware import load_machine, resize
from lohan.preset_shapes import SHAPES
from lohan.presets import preset_profile
from lohan.profiles import MachineProfile
from lohan.sim.memory import memory_needs
from lohan.sim.strategies import Calibration, build_scenario

RESIDENT_BLOCK_FLOPS = 160e12
DATA = Path(__file__).parent / "data"
STRATEGY = {
    "lohan": "lohan-paper",
    "lohan separate optimizer stage": "separate-stage",
    "lohan naive": "lohan-paper-naive",
    "zero-infinity": "zero-infinity",
    "zero-offload": "zero-offload",
}
SIZES = ("gpt-1.55b", "gpt-6b", "gpt-13b", "gpt-30b", "gpt-70b", "gpt-135b", "gpt-175b", "gpt-276b", "gpt-412b")
GPU_SHARES = tuple(share / 100 for share in range(40, 101, 2))
HOST_RATES = tuple(rate * 1e8 for rate in range(10, 41, 2))
EXCHANGE_RATES = tuple(rate * 1e8 for rate in range(6, 31))
DRIVE_SHARES = tuple(share / 100 for share in range(20, 101, 5))
CALIBRATED = ("lohan", "zero-infinity", "zero-offload")


@dataclass(frozen=True, slots=True)
class Row:
    """One published run."""

    figure: str
    system: str
    model: str
    gpus: int
    ssds: int
    batch: int
    seconds: float

    @property
    def strategy(self) -> str:
        return STRATEGY[self.system]


def read_rows() -> list[Row]:
    with (DATA / "published_throughput.csv").open() as file:
        return [
            Row(
                one["figure"], one["system"], f"gpt-{one['model'].lower()}", int(one["gpus"]), int(one["ssds"]),
                int(one["batch"]), float(one["seconds_per_step"]),
            )
            for one in csv.DictReader(file)
            if one["system"] in STRATEGY
        ]  # fmt: skip


def predict(row: Row, testbed: MachineProfile, calibration: Calibration) -> float:
    """Seconds per step. The batch is shared among the GPUs."""
    machine = resize(testbed, gpus=row.gpus, ssds=row.ssds)
    profile = preset_profile(row.model, micro_batch_size=row.batch // row.gpus)
    return build_scenario(row.strategy, profile, machine, calibration=calibration, steps=2).run().seconds_per_step


def mean_error(rows: Iterable[Row], testbed: MachineProfile, calibration: Calibration) -> float:
    errors = [abs(predict(row, testbed, calibration) / row.seconds - 1) for row in rows]
    return sum(errors) / len(errors)


def fit(
    rows: Sequence[Row], testbed: MachineProfile, start: Calibration, grids: Mapping[str, Sequence[float]]
) -> Calibration:
    """The constants with the least mean error: all combinations are tried."""
    candidates = [
        replace(start, **dict(zip(grids, values, strict=True)))  # type: ignore[arg-type]
        for values in product(*grids.values())
    ]
    return min(candidates, key=lambda candidate: mean_error(rows, testbed, candidate))


def calibrate(rows: Sequence[Row], testbed: MachineProfile, start: Calibration) -> dict[str, Calibration]:
    """By system."""
    of = {system: [row for row in rows if row.system == system] for system in STRATEGY}
    # One GPU says nothing about the exchange between several.
    single = [row for row in of["lohan"] if row.gpus == 1]
    several = [row for row in of["lohan"] if row.gpus > 1]
    lohan = fit(single, testbed, start, {"gpu_share": GPU_SHARES, "update_parameters_per_second": HOST_RATES})
    lohan = fit(several, testbed, lohan, {"exchange_bytes_per_second": EXCHANGE_RATES})
    offload = fit(of["zero-offload"], testbed, lohan, {"gpu_share": GPU_SHARES})
    infinity = fit(of["zero-infinity"], testbed, lohan, {"gpu_share": GPU_SHARES, "drive_share": DRIVE_SHARES})
    return {
        "lohan": lohan,
        "lohan separate optimizer stage": lohan,
        "lohan naive": lohan,
        "zero-infinity": infinity,
        "zero-offload": offload,
    }


def largest_models(testbed: MachineProfile) -> tuple[int, int]:
    """Prints which models fit beside the published table; how many agree, of how many."""
    agree = 0
    with (DATA / "largest_model.csv").open() as file:
        rows = list(csv.DictReader(file))
    print("\nlargest model, billions of parameters, batch 1")
    print(f"{'system':<16}{'RAM GB':>8}{'published':>11}{'simulated':>11}  next size")
    for one in rows:
        machine = resize(testbed, host_memory_bytes=int(one["ram_gb"]) * 10**9)
        strategy = STRATEGY.get(one["system"], one["system"])
        fitting, reason = "none", ""
        for name in SIZES:
            profile = preset_profile(name)
            reason = memory_needs(strategy, profile, machine).misfit(machine)
            if reason:
                reason = f"{name.removeprefix('gpt-')} {reason}"
                break
            fitting = name.removeprefix("gpt-").removesuffix("b")
        same = float(fitting) == float(one["largest_billion_parameters"])
        agree += same
        print(
            f"{one['system']:<16}{one['ram_gb']:>8}{one['largest_billion_parameters']:>11}{fitting:>11}  {reason}"
            f"{'' if same else '   DIFFERS'}"
        )
    return agree, len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="calibrate on all rows")
    parser.add_argument("--blocks-in-flight", type=int, default=1)
    arguments = parser.parse_args()
    everything = arguments.all
    assert set(SIZES) <= set(SHAPES)
    testbed = replace(load_machine("lohan-testbed"), gpu_flops_per_second=RESIDENT_BLOCK_FLOPS)
    rows = read_rows()
    seen: set[Row] = set()
    for system in STRATEGY:
        mine = [row for row in rows if row.system == system]
        if system in CALIBRATED:
            seen |= set(mine if everything else mine[::2])
    calibrations = calibrate(
        [row for row in rows if row in seen], testbed, Calibration(blocks_in_flight=arguments.blocks_in_flight)
    )
    for system in CALIBRATED:
        one = calibrations[system]
        print(
            f"{system}: gpu_share {one.gpu_share:.2f}, drive_share {one.drive_share:.2f}, host work "
            f"{(one.update_parameters_per_second or 0) / 1e9:.2f}e9 parameters/s, exchange "
            f"{one.exchange_bytes_per_second / 1e9:.2f}e9 bytes/s"
        )
    print(
        f"\n{'system':<32}{'model':<10}{'gpus':>5}{'ssds':>5}{'batch':>6}{'measured':>10}{'simulated':>11}{'error':>8}"
    )
    errors: dict[Row, float] = {}
    for row in rows:
        seconds = predict(row, testbed, calibrations[row.system])
        errors[row] = seconds / row.seconds - 1
        print(
            f"{row.system:<32}{row.model:<10}{row.gpus:>5}{row.ssds:>5}{row.batch:>6}{row.seconds:>10.2f}{seconds:>11.2f}"
            f"{errors[row]:>+8.1%}{'  calibrated on' if row in seen else ''}"
        )
    print()
    for system in STRATEGY:
        of = [abs(error) for row, error in errors.items() if row.system == system]
        print(f"{system:<32} mean {sum(of) / len(of):.1%}, worst {max(of):.1%}")
    agree, of_all = largest_models(testbed)
    lohan = [abs(error) for row, error in errors.items() if row.system == "lohan"]
    baselines = [abs(error) for row, error in errors.items() if row.system != "lohan"]
    unseen = [abs(error) for row, error in errors.items() if row not in seen]
    print(f"\nlargest models: {agree} of {of_all} as published")
    result = {
        "lohan_mean_error": round(sum(lohan) / len(lohan), 4),
        "lohan_worst_error": round(max(lohan), 4),
        "baselines_mean_error": round(sum(baselines) / len(baselines), 4),
        "unseen_half_mean_error": round(sum(unseen) / len(unseen), 4) if unseen else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
