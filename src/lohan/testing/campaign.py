"""The long runs behind the store's promises; the test suite has a short form of each.

    python -m lohan.testing.campaign property --examples 20000
    python -m lohan.testing.campaign kill --rounds 200 --directory DIR --drives 2

`property` drives random sequences with crashes, power losses and failures against a model, on drives in memory.
`kill` kills a real writer on real files. Both print progress, end with one line of JSON, and exit 1 on a failure.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path


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


def main(arguments: list[str] | None = None) -> int:
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
    chosen = parser.parse_args(arguments)
    if chosen.command == "property":
        return property_campaign(chosen.examples, chosen.steps)
    seed = random.SystemRandom().getrandbits(32) if chosen.seed is None else chosen.seed
    return kill_campaign(chosen.rounds, chosen.directory, chosen.drives, seed)


if __name__ == "__main__":
    sys.exit(main())
