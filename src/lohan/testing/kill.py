"""A writer process that is killed again and again, and a parent that looks at what it left.

The writer loops begin, write some records, sometimes commit, and says over a pipe which commit it is about to issue
and which has finished. The parent kills it at a random moment (SIGKILL: no handler runs), opens the same store, and
finds exactly the last finished commit, or the one that was under way, to the bit. Then the next writer goes on with
the same store.

A record's bytes follow from its number and the step that wrote it, and every commit's metadata says which step that
was, so the parent needs nothing from the dead process but its last words.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lohan.store import RecordSpec, Store, create_store, open_store, verify_store
from lohan.store.arena import map_memory, round_up

CHUNK_BYTES = 64 << 10
# Below, at and above the size of a chunk, and one that takes several requests.
SIZES = (1, 4095, 4097, 65536, 65537, 200_000, 262_144, 1 << 20, 5_000_001)
RECORDS = tuple(RecordSpec(name=f"record.{i}", num_bytes=size) for i, size in enumerate(SIZES))

Steps = dict[str, int]
"""For every record, the step that wrote its committed bytes."""


@dataclass(slots=True)
class Tally:
    """What a campaign saw."""

    kills: int = 0
    commits: int = 0
    found_finished: int = 0
    """Reopenings that found the last commit the writer heard of."""
    found_under_way: int = 0
    """Reopenings that found a commit that was durable before the writer could hear of it."""
    killed_in_commit: int = 0
    failures: int = 0


def content(record: int, step: int) -> bytes:
    """The bytes that `step` writes into a record."""
    return np.random.default_rng([record, step]).bytes(SIZES[record])


# -- the writer -----------------------------------------------------------------------------------------


def say(word: str, step: int, steps: Steps) -> None:
    # One write below PIPE_BUF: it arrives whole or not at all, whenever we are killed.
    os.write(1, (json.dumps([word, step, steps]) + "\n").encode())


def write_forever(directories: Sequence[str], seed: int) -> None:
    """Write and commit until killed."""
    rng = random.Random(seed)
    with open_store(directories) as store:
        steps: Steps = dict(store.metadata.get("steps", {}))
        step = -1 if store.committed_step is None else store.committed_step
        say("open", step, steps)
        while True:
            step += 1
            store.begin(step)
            handles = []
            for record in rng.sample(range(len(RECORDS)), rng.randint(1, 5)):
                data = content(record, step)
                padded = memoryview(map_memory(round_up(len(data)), touch=False))
                padded[: len(data)] = data
                handles.append(store.write(RECORDS[record].name, padded))
                steps[RECORDS[record].name] = step
            if rng.random() < 0.3:
                continue  # this step stays uncommitted; the next one builds on it
            say("commit", step, steps)
            store.commit(step, {"steps": steps}).wait()
            say("done", step, steps)
            for handle in handles:
                handle.wait()


# -- the parent -----------------------------------------------------------------------------------------


def run(
    directories: Sequence[Path],
    *,
    num_rounds: int,
    seed: int,
    longest_seconds: float = 0.4,
    progress: Callable[[Tally], None] | None = None,
) -> Tally:
    """Create a store, then kill its writer `num_rounds` times. Failures are counted and printed to stderr."""
    rng = random.Random(seed)
    create_store(directories, RECORDS, chunk_bytes=CHUNK_BYTES, weights=[1.0] * len(directories))
    tally = Tally()
    last: tuple[int, Steps] = (-1, {})
    for _ in range(num_rounds):
        words = list(_kill_one_writer(directories, rng, longest_seconds))
        under_way = None
        for word, step, steps in words:
            if word == "commit":
                under_way = (step, steps)
            if word == "done":
                last, under_way = (step, steps), None
                tally.commits += 1
        tally.kills += 1
        tally.killed_in_commit += under_way is not None
        allowed = [last] if under_way is None else [last, under_way]
        try:
            found = look(directories, allowed)
        except Exception as error:  # whatever it is, it is a failure of this round and the count must go on
            print(f"kill {tally.kills}: {type(error).__name__}: {error}", file=sys.stderr)
            tally.failures += 1
            break  # what the store holds is unknown now; more rounds would only repeat this one's failure
        tally.found_finished += found == last
        tally.found_under_way += found != last
        tally.commits += found != last
        last = found
        if progress:
            progress(tally)
    return tally


def look(directories: Sequence[Path], allowed: Sequence[tuple[int, Steps]]) -> tuple[int, Steps]:
    """Open the store and check that it holds one of the allowed versions, to the bit. Returns which."""
    with open_store(directories) as store:
        step = -1 if store.committed_step is None else store.committed_step
        steps: Steps = store.metadata.get("steps", {})
        if (step, steps) not in allowed:
            raise AssertionError(f"found step {step} with {steps}; allowed are {allowed}")
        for index, record in enumerate(RECORDS):
            if record.name not in steps:
                if store.is_written(record.name):
                    raise AssertionError(f"{record.name} was never committed and has a value")
                continue
            _check(store, index, steps[record.name])
        problems = verify_store(store)
        if problems:
            raise AssertionError(str(problems[0]))
        return step, steps


def _check(store: Store, index: int, step: int) -> None:
    record = RECORDS[index]
    into = memoryview(map_memory(round_up(record.num_bytes), touch=False))
    store.read(record.name, into).wait()
    if into[: record.num_bytes] != content(index, step):
        raise AssertionError(f"{record.name} does not hold the bytes of step {step}")


def _kill_one_writer(
    directories: Sequence[Path], rng: random.Random, longest: float
) -> Iterator[tuple[str, int, Steps]]:
    """Start a writer, kill it after a random time, and hand on what it said."""
    command = [sys.executable, "-m", "lohan.testing.kill", str(rng.getrandbits(32)), *map(str, directories)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    first = b""
    try:
        if rng.random() < 0.9:
            first = writer.stdout.readline()
        # else: somewhere in its start, in the opening of the store, in the mending of what the last one left
        time.sleep(rng.uniform(0, longest))
    finally:
        writer.kill()
        rest = writer.stdout.read()
        writer.stdout.close()
        code = writer.wait()
    if code != -9:
        raise RuntimeError(f"the writer ended by itself with exit code {code}; it should run until killed")
    for line in (first + rest).splitlines():
        word, step, steps = json.loads(line)
        yield word, step, steps


if __name__ == "__main__":
    write_forever(sys.argv[2:], int(sys.argv[1]))
