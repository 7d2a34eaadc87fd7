"""How long does it take to create and to open a store with very many records?

    python benchmarks/store_open.py --directory DIR --records 100000

Creates a store of small records once, then opens it 9 times, each in a new process: time is from the call of
open_store() until it returns, memory is the peak of the whole process. Also times dealing the chunks of a 2.5 TB
store over 12 drives, which touches no drive. Prints median and spread; the last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from lohan.store import RecordSpec, create_store
from lohan.store.layout import make_layout

OPEN = """
import sys, time
from pathlib import Path
from lohan.store import open_store
started = time.perf_counter()
with open_store(sys.argv[1:]) as store:
    seconds = time.perf_counter() - started
peak = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
print(seconds, int(peak.split()[1]) * 1024)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("."), help="on the drive to measure")
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--large-tb", type=float, default=2.5, help="size of the store that is only dealt out")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, NumPy {np.__version__}")
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="store_open.") as place:
        drives = [Path(place) / name for name in ("a", "b", "c")]
        records = [RecordSpec(name=f"layer.{i // 100}.part.{i}", num_bytes=4096 + i) for i in range(options.records)]
        started = time.perf_counter()
        create_store(drives, records, weights=[1, 1, 1])
        created = time.perf_counter() - started
        opened, peaks = [], []
        for _ in range(options.rounds):
            command = [sys.executable, "-c", OPEN, *map(str, drives)]
            words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            opened.append(float(words[0]))
            peaks.append(int(words[1]) / 1e6)
    print(f"{options.records} records over 3 directories: created in {created:.2f} s")
    print(f"opened in {statistics.median(opened):.3f} s ({min(opened):.3f}-{max(opened):.3f})")
    print(f"peak of the opening process {statistics.median(peaks):.0f} MB ({min(peaks):.0f}-{max(peaks):.0f})")
    large = [RecordSpec(name=f"record.{i}", num_bytes=1 << 30) for i in range(round(options.large_tb * 1e12) >> 30)]
    started = time.perf_counter()
    layout = make_layout(large, weights=[1.0] * 12, versions=2)
    dealt = time.perf_counter() - started
    print(f"{layout.num_chunks} chunks dealt to 12 drives in {dealt:.2f} s")
    summary = {
        "open_seconds": round(statistics.median(opened), 4),
        "open_peak_mb": round(statistics.median(peaks), 1),
        "create_seconds": round(created, 3),
        "deal_seconds": round(dealt, 3),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
