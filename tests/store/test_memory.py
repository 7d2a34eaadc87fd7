"""The store's own memory: small to open, and flat however much is streamed through it.

Each claim is measured in a process of its own, whose peak resident set says what it took.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lohan.store import RecordSpec, create_store

MB = 10**6
MIB = 1 << 20

# What a parent had resident before exec counts into ru_maxrss on Linux; VmHWM starts anew with the program.
PEAK = """
from pathlib import Path
def peak_bytes():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
"""

OPEN = """
import sys
from lohan.store import open_store
with open_store(sys.argv[1:]) as store:
    assert len(store.layout.records) == 100_000
print(peak_bytes())
"""

STREAM = """
import sys
from collections import deque
from lohan.store import open_arena, open_store

total = int(sys.argv[1])
with open_arena(256 * 10**6) as arena, open_store(sys.argv[2:]) as store:
    moved, turn, pending = 0, 0, deque()

    def finish():
        handle, slab = pending.popleft()
        handle.wait()
        slab.release()

    store.begin(0)
    while moved < total:
        start = store.read if turn % 2 else store.write
        for record in store.layout.records:
            while (slab := arena.try_lease(record.num_bytes)) is None:
                finish()
            pending.append((start(record.name, slab.padded), slab))
            moved += record.num_bytes
        turn += 1
    while pending:
        finish()
    store.commit(0).wait()
print(peak_bytes())
"""


def peak_of(script: str, *arguments: object) -> int:
    # The limit is for a hang, not a claim about speed.
    done = subprocess.run(
        [sys.executable, "-c", PEAK + script, *map(str, arguments)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_opening_100_000_records_takes_less_than_200_mb(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    records = [RecordSpec(name=f"layer.{i // 100}.part.{i}", num_bytes=1 + i % 8192) for i in range(100_000)]
    create_store(drives, records, weights=[1, 2])
    assert peak_of(OPEN, *drives) < 200 * MB


def test_streaming_8_gb_through_a_256_mb_arena_takes_at_most_150_mb_more(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    records = [RecordSpec(name=f"record.{i}", num_bytes=32 * MIB - i) for i in range(16)]  # most end inside a page
    create_store(drives, records, weights=[1, 1, 1])
    assert peak_of(STREAM, 8 * 10**9, *drives) < (256 + 150) * MB
