"""On how many cores torch's operators run, thread by thread.

OpenMP gives every thread that runs an operator on several cores helpers of its own. While they are not more than the
cores they wait for the next operator awake; as soon as there are more, in the whole process, all of them sleep between
operators, and every operator waits for somebody to wake up: 5 to 15 % of a block's time on 2 cores
(benchmarks/results/2026-11-17_one_team.md). So one thread of a run computes on all cores, the one that asked for the
step, and the others that only do a little stay on the core they are on.

torch.set_num_threads() is no help: it changes the number for other threads too. So OpenMP and MKL are asked, which
count by thread; where they cannot be found nothing happens.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_SETTERS = {
    "omp_set_num_threads": re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$"),
    "MKL_Set_Num_Threads_Local": re.compile(r"/lib(torch_cpu|mkl_rt)\b[^/]*\.so[^/]*$"),
}
"""The calls, and the libraries that may have them."""


def use_cores(num: int) -> None:
    """Torch's operators take this many cores on the calling thread."""
    torch.get_num_threads()  # at its first look on a thread torch sets its own number; ours has to come after that
    for call in _setters():
        call(num)


@contextmanager
def on_one_core() -> Iterator[None]:
    """Torch's operators take one core on the calling thread, and afterwards as many as before."""
    before = torch.get_num_threads()
    use_cores(1)
    try:
        yield
    finally:
        use_cores(before)


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """On this core alone, without the GIL. Both are contiguous and on the host; copy_() would take all cores."""
    assert source.nbytes == target.nbytes, "a copy of equal numbers of bytes"
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


@cache
def _setters() -> tuple[Callable[[int], object], ...]:
    """Of the libraries that are loaded: torch's, and perhaps those of other packages."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ()
    paths = sorted({line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line})
    found = []
    for name, pattern in _SETTERS.items():
        for path in filter(pattern.search, paths):
            try:
                call = getattr(ctypes.CDLL(path), name)
            except (AttributeError, OSError):
                continue  # built without it, or its file has been replaced since
            call.argtypes = [ctypes.c_int]
            found.append(call)
    return tuple(found)
