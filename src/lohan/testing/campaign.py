"""The long runs behind what is promised; the test suite has a short form of each.

    python -m lohan.testing.campaign property --examples 20000
    python -m lohan.testing.campaign kill --rounds 200 --directory DIR --drives 2
    python -m lohan.testing.campaign train-kill --rounds 50 --directory DIR
    python -m lohan.testing.campaign parity --seconds 600
    python -m lohan.testing.campaign races --seeds 200

`property` drives random sequences with crashes, power losses and failures against a model, on drives in memory.
`kill` kills a real writer on real files. `train-kill` stops `lohan train` by kill -9, Ctrl-C and SIGTERM, and compares
what comes out in the end with a training that was never stopped. `parity` compares runs with plain PyTorch to the bit:
the full product of models, micro-batches, clipping, formats, drives, commits and devices, each with random values of
everything else. `races` does the same with random delays on every lane and late I/O. All print progress, end with one
line of JSON, and exit 1 on a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lohan.testing import parity


def property_campaign(num_examples: int, num_steps: int) -> int:
    """Random sequences, in batches, so that there is something to see on the way."""
    from lohan.testing import machine  # hypothesis is needed here and nowhere else

    started, done, batch = time.perf_counter(), 0, 250
    while done < num_examples:
        count = min(batch, num_examples - done)
        try:
            machine.run(count, num_steps=num_steps)
        except Exception:
            print(json.dumps({"examples": done, "failures": 1}), flush=True)
            raise
        done += count
        print(f"{done} of {num_examples} sequences, {time.perf_counter() - started:.0f} s", flush=True)
    print(json.dumps({"examples": done, "failures": 0}))
    return 0


def kill_campaign(num_rounds: int, directory: Path | None, num_drives: int, seed: int) -> int:
    """SIGKILLs on real files, in new folders under `directory`, which are removed afterwards."""
    from lohan.testing import kill

    def progress(tally: kill.Tally) -> None:
        if tally.kills % 10 == 0 or tally.kills == num_rounds:
            print(f"{tally.kills} of {num_rounds} kills, {tally.commits} commits", flush=True)

    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="lohan-kill-", dir=directory) as folder:
        drives = [Path(folder) / f"drive{i}" for i in range(num_drives)]
        tally = kill.run(drives, num_rounds=num_rounds, seed=seed, progress=progress)
    print(
        f"{tally.killed_in_commit} kills hit a commit; {tally.found_finished} reopenings found the last finished "
        f"commit, {tally.found_under_way} the one under way"
    )
    print(json.dumps({key: asdict(tally)[key] for key in ("kills", "commits", "failures")}))
    return 1 if tally.failures else 0


def train_kill_campaign(num_rounds: int, directory: Path | None, save_steps: int, seed: int) -> int:
    """`lohan train`, stopped at random moments, in a new folder under `directory`, which is removed afterwards."""
    from lohan.testing import train_kill

    def progress(tally: train_kill.Tally) -> None:
        print(f"{tally.kills} kills, {tally.stops} stops, {tally.finished} runs finished", flush=True)

    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="lohan-train-kill-", dir=directory) as folder:
        tally = train_kill.run(Path(folder), num_rounds=num_rounds, seed=seed, save_steps=save_steps, progress=progress)
    print(json.dumps(asdict(tally)))
    return 1 if tally.failures else 0


def parity_campaign(full: bool, seconds: float, seed: int, directory: Path | None) -> int:
    """The product of what is promised, in random order, until it is done or (without `full`) the time is over."""
    from lohan.testing import parity

    return _compare_cases(parity.all_cases(seed), None if full else seconds, seed, directory)


def races_campaign(num_seeds: int, seed: int, directory: Path | None) -> int:
    """Random cases on `virtual`, each with delays of its own on every lane and in the store's I/O."""
    from dataclasses import replace

    from lohan.testing import parity

    rng = random.Random(seed)
    cases = [replace(parity.random_case(rng), device="virtual") for _ in range(num_seeds)]
    return _compare_cases(cases, None, seed, directory, races=True)


def _compare_cases(
    cases: Sequence[parity.Case], seconds: float | None, seed: int, directory: Path | None, *, races: bool = False
) -> int:
    import torch
    import transformers

    from lohan.testing import parity

    torch.set_num_threads(1)  # a zoo model is smaller than the cost of sharing it
    transformers.utils.logging.disable_progress_bar()
    started, done, failures = time.perf_counter(), 0, 0
    print(f"seed {seed}, {len(cases)} cases", flush=True)
    with tempfile.TemporaryDirectory(prefix="lohan-parity-", dir=directory) as folder:
        for number, case in enumerate(cases):
            if seconds is not None and time.perf_counter() - started > seconds:
                break
            place = Path(folder) / f"run{number}"
            found: object
            try:
                models = Path(folder) / "models"
                if races:
                    found = parity.race_case(case, models, place, seed=seed + number)
                else:
                    found = parity.run_case(case, models, place)
            except Exception as error:  # a failure like any other: told with its case, and the rest goes on
                found = f"{type(error).__name__}: {error}"
            shutil.rmtree(place, ignore_errors=True)
            done += 1
            if found is not None:
                failures += 1
                print(f"FAILED seed {seed + number}: {case}: {found}", flush=True)
            if done % 20 == 0 or done == len(cases):
                print(f"{done} of {len(cases)} cases, {time.perf_counter() - started:.0f} s", flush=True)
    print(json.dumps({"cases": done, "failures": failures}))
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    os.environ.setdefault("MKL_CBWR", "AUTO")  # bits must not depend on where memory lies: docs/engine.md
    parser = argparse.ArgumentParser(prog="python -m lohan.testing.campaign", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    sequences = commands.add_parser("property", help="random sequences against a model")
    sequences.add_argument("--examples", type=int, default=5000, metavar="N")
    sequences.add_argument("--steps", type=int, default=30, metavar="N", help="operations per sequence")
    kills = commands.add_parser("kill", help="SIGKILL a writer again and again")
    kills.add_argument("--rounds", type=int, default=200, metavar="N")
    kills.add_argument("--directory", type=Path, help="where to make the store (default: the temporary folder)")
    kills.add_argument("--drives", type=int, default=2, metavar="N")
    kills.add_argument("--seed", type=int, default=None, help="repeat a run's choices (not its timing)")
    trainings = commands.add_parser("train-kill", help="stop `lohan train` again and again")
    trainings.add_argument("--rounds", type=int, default=50, metavar="N")
    trainings.add_argument("--directory", type=Path, help="where to work (default: the temporary folder)")
    trainings.add_argument("--save-steps", type=int, default=1, metavar="N", help="commit every so many steps")
    trainings.add_argument("--seed", type=int, default=None, help="repeat a run's choices (not its timing)")
    parities = commands.add_parser("parity", help="runs against plain PyTorch, to the bit")
    parities.add_argument("--full", action="store_true", help="the whole product, however long it takes")
    parities.add_argument("--seconds", type=float, default=600.0, metavar="N", help="stop after this long")
    races = commands.add_parser("races", help="the same with random delays on every lane")
    races.add_argument("--seeds", type=int, default=200, metavar="N")
    for command in (parities, races):
        command.add_argument("--seed", type=int, default=None, help="repeat a run's choices")
        command.add_argument("--directory", type=Path, help="where to make the stores (default: the temporary folder)")
    chosen = parser.parse_args(arguments)
    if chosen.command == "property":
        return property_campaign(chosen.examples, chosen.steps)
    seed = random.SystemRandom().getrandbits(32) if chosen.seed is None else chosen.seed
    if chosen.command == "parity":
        return parity_campaign(chosen.full, chosen.seconds, seed, chosen.directory)
    if chosen.command == "train-kill":
        return train_kill_campaign(chosen.rounds, chosen.directory, chosen.save_steps, seed)
    if chosen.command == "races":
        return races_campaign(chosen.seeds, seed, chosen.directory)
    return kill_campaign(chosen.rounds, chosen.directory, chosen.drives, seed)


if __name__ == "__main__":
    sys.exit(main())
