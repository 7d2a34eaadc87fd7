"""The update as one pass over memory in C, where this machine has a compiler; without it nothing is missing but speed.

build: source -> library in the user's cache.  kernel: the call.  find: the test a kernel must pass to be used.
norm: the norm of a gradient, with a test of its own.
update.c is compiled at first use. Whatever goes wrong, there is a reason in words and torch does the work.
"""

from __future__ import annotations

from lohan.optim.native.build import Unavailable
from lohan.optim.native.find import find_kernel
from lohan.optim.native.kernel import Kernel, Numbers, Range
from lohan.optim.native.norm import find_norm

__all__ = ["Kernel", "Numbers", "Range", "Unavailable", "find_kernel", "find_norm"]
