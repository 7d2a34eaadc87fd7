"""Is one version of the engine, or one setting of it, faster than another on this noisy machine?

    git worktree add ../before main~3
    python benchmarks/by_turns.py --directory DIR --models DIR --parameters 250M --tokens 256 --rounds 8 \\
        before=../before/src now=src "short spin=src,GOMP_SPINCOUNT=10000" more=src,host_memory=3200000000

Every variant is a path to the sources and, behind commas, variables of its environment, or host_memory in bytes. All
are opened at once, each a worker of `bench.py` with its budget and the same machine's profile, and take steps in turn,
in changing order, so that what the machine does to one it does to all. Prints each one's median step and the median of
its steps over the first variant's steps of the same rounds; the last line is JSON. All variants must fit in memory
together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from peers.driving import Worker
from peers.serving import Job
from peers.systems import ALL
from peers.workloads import SHAPES

HERE = Path(__file__).resolve().parent
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="NAME=SRC[,VARIABLE=VALUE...]")
    parser.add_argument("--system", choices=list(ALL), default="lohan")
    parser.add_argument("--parameters", choices=list(SHAPES), default="250M")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--directory", type=Path, default=Path(), help="where stores go; a drive's, not RAM's")
    parser.add_argument("--models", type=Path, help="where models are kept")
    options = parser.parse_args()
    system = ALL[options.system]
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lohan-turns-") as name, ExitStack() as stack:
        folder = Path(name)
        model = (options.models or folder) / f"model-{options.parameters}"
        if not model.exists():
            make = [sys.executable, str(HERE / "peers" / "workloads.py"), options.parameters, str(model)]
            subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
        machine = folder / "machine.yaml"
        profile = ["profile", "--ssd", str(folder), "--device", "cpu", "--out", str(machine)]
        subprocess.run([sys.executable, "-m", "lohan", *profile], check=True, stdout=subprocess.DEVNULL)
        workers: dict[str, Worker] = {}
        for number, variant in enumerate(options.variants):
            title, _, rest = variant.partition("=")
            source, *variables = rest.split(",")
            environment = dict(one.split("=", 1) for one in variables)
            more = {"host_memory": int(environment.pop("host_memory"))} if "host_memory" in environment else {}
            job = Job(
                folder=str(model), directory=str(folder / str(number)), shape=options.parameters, tokens=options.tokens,
                micro_batch_tokens=system.micro_batch_tokens(options.parameters, options.tokens),
                options={**system.options_for(options.parameters, options.tokens), "machine": str(machine), **more},
            )  # fmt: skip
            environment["PYTHONPATH"] = f"{Path(source).resolve()}:{HERE}"
            workers[title] = Worker(system, job, environment=environment)
            stack.callback(workers[title].close)
        seconds = steps_by_turns(workers, options.rounds)
    first = next(iter(seconds.values()))
    ratios = {
        title: statistics.median(mine / theirs for mine, theirs in zip(taken, first, strict=True))
        for title, taken in seconds.items()
    }
    for title, taken in seconds.items():
        print(f"{title:20} {statistics.median(taken):7.2f} s  {ratios[title]:.3f} of the first one's")
    print(json.dumps({title: round(ratio, 3) for title, ratio in ratios.items()}))


def steps_by_turns(workers: dict[str, Worker], rounds: int) -> dict[str, list[float]]:
    """Seconds of every counted step of each."""
    seconds: dict[str, list[float]] = {title: [] for title in workers}
    for number in range(1, WARM_UP + rounds + 1):
        order = list(workers) if number % 2 else list(workers)[::-1]
        for title in order:
            taken = workers[title].step(number)["seconds"]
            if number > WARM_UP:
                seconds[title].append(taken)
    return seconds


if __name__ == "__main__":
    main()
