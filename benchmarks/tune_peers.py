"""Which settings make DeepSpeed on NVMe fastest here?

    python benchmarks/tune_peers.py [--parameters 250M] [--tokens 1024] [--only NAME ...] [--directory DIR]

Changes one setting at a time against the best so far (benchmarks/peers/deepspeed_worker.py, TUNED), each in a process
of its own: two steps that do not count, two that do. The base is measured again between the others, so that a drift of
the machine shows. A setting that does not run is told with its reason. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.driving import Worker, WorkerFailed
from peers.serving import Job
from peers.systems import SYSTEMS
from peers.workloads import SHAPES

WORKLOADS = Path(__file__).resolve().parent / "peers" / "workloads.py"
SWEEP: dict[str, dict[str, Any]] = {
    "base": {},
    "optimizer buffers 12, pipelined": {"optimizer_buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
    "optimizer buffers 8, read pipelined": {"optimizer_buffer_count": 8, "pipeline_read": True},
    "optimizer buffers 8, write pipelined": {"optimizer_buffer_count": 8, "pipeline_write": True},
    "sub-groups of 10M": {"sub_group_size": 10_000_000},
    "sub-groups of 50M": {"sub_group_size": 50_000_000},
    "sub-groups of 100M": {"sub_group_size": 100_000_000},
    "sub-groups of 250M": {"sub_group_size": 250_000_000},
    "base again": {},
    "aio block 256 KiB": {"block_size": 256 << 10},
    "aio block 8 MiB": {"block_size": 8 << 20},
    "aio depth 32": {"queue_depth": 32},
    "aio block 8 MiB, depth 32": {"block_size": 8 << 20, "queue_depth": 32},
    "aio 2 threads": {"threads": 2},
    "aio 4 threads": {"threads": 4},
    "base once more": {},
    "parameter buffers 6": {"param_buffer_count": 6},
    "parameter buffers 24": {"param_buffer_count": 24},
    "no prefetch": {"prefetch_bucket_size": 0},
    "prefetch 200M": {"prefetch_bucket_size": 200_000_000},
    "pinned": {"pin_memory": True},
    "parameters of up to 2M persistent": {"persistence_threshold": 2_000_000},
    "gradient buckets of 5M": {"reduce_bucket_size": 5_000_000},
    "gradient buckets of 500M, the default": {"reduce_bucket_size": 500_000_000},
    "gradients not copied together": {"contiguous_gradients": False},
    "gradients all-reduced in place": {"reduce_scatter": False},
}


def measure(directory: Path, folder: Path, shape: str, tokens: int, change: dict[str, Any]) -> dict[str, Any]:
    system = SYSTEMS["deepspeed-nvme"]
    job = Job(
        folder=str(folder), directory=str(directory / "run"), shape=shape, tokens=tokens, micro_batch_tokens=tokens,
        options={**system.options_for(shape, tokens), **change},
    )  # fmt: skip
    try:
        worker = Worker(system, job, timeout_seconds=170)
        steps = [worker.step(number) for number in range(1, 5)]
        worker.close()
    except WorkerFailed as failure:
        return {"failed": str(failure)}
    return {
        "seconds": statistics.mean(step["seconds"] for step in steps[2:]),
        "peak_rss": max(step["peak_rss"] for step in steps),
        "ssd_bytes": sum(step["read_bytes"] + step["write_bytes"] for step in steps[2:]) / 2,
        "loss": steps[-1]["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=list(SHAPES), default="250M")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--directory", type=Path, help="where model and swap files go; a drive's, not RAM's")
    parser.add_argument("--only", nargs="+", choices=list(SWEEP), default=list(SWEEP))
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lohan-tune-") as name:
        folder = Path(name) / "model"
        make = [sys.executable, str(WORKLOADS), options.parameters, str(folder)]
        subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
        for title in options.only:
            one = found[title] = measure(Path(name), folder, options.parameters, options.tokens, SWEEP[title])
            said = one.get("failed") or (
                f"{one['seconds']:.2f} s, peak {one['peak_rss'] / 1e9:.2f} GB, SSD {one['ssd_bytes'] / 1e9:.2f} GB a "
                f"step, loss {one['loss']:.4f}"
            )
            print(f"{title:38} {said}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
