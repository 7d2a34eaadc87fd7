"""The threads torch's operators run on, for work of ours between two operators.

OpenMP keeps helpers for a thread that runs operators on several cores, and for some milliseconds after each operator
they stay awake on their cores, waiting for the next. Threads started meanwhile have to share those cores with them: on
two cores an update between two matmuls took more than twice its time. The helpers themselves are free to do it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch


@cache
def torch_team() -> int | None:
    """The address of GOMP_parallel(function, argument, num_threads, flags) in the OpenMP that torch uses, if it has it.

    GNU's, LLVM's and Intel's all do. It is looked up through torch's own library: another copy, loaded by another
    package, would bring helpers of its own.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None
