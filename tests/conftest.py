"""For all tests, before anything is computed."""

import os
import time

import pytest

from lohan.amx import avoid_unusable_amx

# MKL's kernels may round differently where memory is aligned differently, depending on the CPU: seen with mixtral and
# gpt-oss, whose small matmuls then differ from plain PyTorch in the last bit. AUTO makes them independent of alignment.
# MKL reads it at its first call, and processes that tests start inherit it.
os.environ.setdefault("MKL_CBWR", "AUTO")

# Tests that are about plain torch may not import lohan before their first matmul.
avoid_unusable_amx()


def python_pace():
    """Seconds of one core for a million and a half small steps of Python, now: 0.05 where nothing else runs.

    For tests of how long something may take: on a machine that is busy or slow, both take longer.
    """
    started, table, total = time.process_time(), {}, 0
    for _ in range(1500):
        for number in range(1000):
            total += table.get(number, number)
    return time.process_time() - started


@pytest.fixture
def pace():
    return python_pace
