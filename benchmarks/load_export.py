"""How close do loading a model and exporting a run come to what the drive can do, and in how much memory?

    python benchmarks/load_export.py --directory DIR --models DIR [--parameters 1B] [--rounds 3]

Each in a process of its own, in turns: a new run from a Hugging Face folder (fp32, dropped from the page cache before),
then the export of that run (fp32 masters, and bf16 weights), synced. The drive's sequential rates (O_DIRECT, 4 threads,
8 MiB requests) are measured right before and right after each, since they drift; a share is the time those rates need
for the bytes that were moved, over the time it took. Prints every round; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.workloads import SHAPES, forget

WORKLOADS = Path(__file__).resolve().parent / "peers" / "workloads.py"
KINDS = ("load", "export fp32", "export bf16")


def work(kind: str, model: Path, store: Path, out: Path) -> dict[str, float]:
    """In the worker's process: seconds, bytes and peak of one of them."""
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401  (imports are no loading)

    from lohan.engine.export import export_run
    from lohan.engine.run import open_run
    from peers.serving import Meter, sync

    torch.set_num_threads(2)
    meter = Meter()
    if kind == "load":
        with open_run(
            model=model, ssd=[store], host_memory=4_000_000_000, device="cpu", learning_rate=1e-5, max_grad_norm=None
        ):
            return meter.read()
    export_run(store, out, master=kind == "export fp32")
    sync(out)
    return meter.read()


def in_its_own_process(kind: str, model: Path, store: Path, out: Path) -> dict[str, float]:
    from alone import sequential_rates

    before = sequential_rates(store.parent)
    command = [sys.executable, __file__, "--work", kind, str(model), str(store), str(out)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    found: dict[str, float] = json.loads(said)
    after = sequential_rates(store.parent)
    read, write = (statistics.mean(pair) for pair in zip(before, after, strict=True))
    found["share"] = (found["read_bytes"] / read + found["write_bytes"] / write) / found["seconds"]
    found["read_rate"], found["write_rate"] = read, write
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="where stores go; a drive's, not RAM's")
    parser.add_argument("--models", type=Path, help="where models are kept")
    parser.add_argument("--parameters", choices=list(SHAPES), default="1B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        kind, *paths = options.work
        print(json.dumps(work(kind, *map(Path, paths))))
        return
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lohan-load-") as name:
        model = (options.models or Path(name)) / f"model-{options.parameters}"
        if not model.exists():
            make = [sys.executable, str(WORKLOADS), options.parameters, str(model)]
            subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
        store, out = Path(name) / "run", Path(name) / "export"
        for number in range(1, options.rounds + 1):
            for kind in KINDS:
                forget(model)
                one = in_its_own_process(kind, model, store, out)
                found[kind].append(one)
                print(
                    f"round {number}  {kind:11}  {one['seconds']:6.2f} s  {one['share']:4.0%} of the drive "
                    f"({one['read_rate'] / 1e9:.1f} and {one['write_rate'] / 1e9:.1f} GB/s)  "
                    f"peak {one['peak_rss'] / 1e9:.2f} GB",
                    flush=True,
                )
                shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(store)
    print(json.dumps({kind: summary(rounds) for kind, rounds in found.items()}))


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "share_of_drive": round(statistics.median(one["share"] for one in rounds), 3),
        "seconds": round(statistics.median(one["seconds"] for one in rounds), 2),
        "peak_rss_bytes": int(max(one["peak_rss"] for one in rounds)),
    }


if __name__ == "__main__":
    main()
