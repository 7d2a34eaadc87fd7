"""How much host memory computing takes beside the slabs, before it does.

On `cpu` everything the computation holds is host memory: weights cast for computing, gradients, what a block keeps
for its own backward, the head's logits, and the block inputs that wait for backward. Elsewhere that is the device's
memory, and the host only holds block inputs.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lohan.engine.layout import UnitLayout
from lohan.models.units import Units
from lohan.plan.fit import HostBudget
from lohan.plan.head import head_bytes

# Python objects, thread stacks, the allocator's own slack, libraries that are loaded with the first operator.
OVERHEAD_BYTES = 64 << 20
# What the C library keeps of freed memory all the same (see bound_allocator), and the matmuls' own buffers: measured at
# 100M parameters, where a working set of 150 MB took 390 MB of heap. With less, memory is handed back and faulted in
# again all the time: 2.5 s of 17 s in a step.
_ALLOCATOR_SLACK = 2.0
# What a block keeps for its backward, in multiples of its matmuls' inputs and outputs.
_BLOCK_COPIES = 2


# mallopt()'s names for what is set below, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_RETURNED_BYTES = 16 << 20
_KEPT_BYTES = 256 << 20


def bound_allocator() -> None:
    """Keep the C library from hoarding freed memory, for the whole process.

    By default glibc keeps freed blocks of up to 32 MiB, in a heap per thread: a gigabyte after two steps of a 1B model.
    From here on every block of 16 MiB or more (gradients, logits) goes back to the system when it is freed, and two
    heaps are shared by all threads. The end of a heap is kept (by default, 128 KiB of it would be): the next block
    needs it again, and Relief gives it back where memory is short. Where the C library is another one, nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, _RETURNED_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_ARENA_MAX, 2)


class Relief:
    """Gives freed memory back to the system when the process comes near its budget.

    Freed blocks below 16 MiB leave holes in the heap: 0.5 GB at 100M parameters and 1024 tokens. Trimming them costs
    the page faults of what is used again, so between micro-batches it is done only where the next might not fit:
    done after every unit it took 0.9 s of core time in a step of 9 s. Once a step, when least is in use, it is done as
    soon as the holes take half of what computing was given, so that they do not grow from step to step.
    """

    def __init__(self, limit_bytes: int, step_limit_bytes: int):
        self._limits = {False: limit_bytes, True: step_limit_bytes}

    def relieve(self, *, step_over: bool) -> None:
        """Between two micro-batches, or two steps."""
        if resident_bytes() > self._limits[step_over]:
            trim_heap()


def trim_heap() -> None:
    """Give all of the heap that is free back to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # another C library, which keeps less


@contextmanager
def old_objects_out_of_sight() -> Iterator[None]:
    """What is there now is not looked at again by Python's search for garbage, until the end of the block.

    With torch and transformers loaded a search among all objects takes 0.2 s, and it comes every few steps in the
    middle of a block. What is garbage already goes first. Who has frozen objects before keeps that as it is.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def resident_bytes() -> int:
    """What the process holds in memory now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def host_budget(
    units: Units,
    layouts: Sequence[UnitLayout],
    *,
    total: int,
    max_tokens: int,
    dtype: torch.dtype,
    separate_memory: bool,
    head_chunks: int = 1,
) -> HostBudget:
    """Split host memory between computing and staging."""
    largest = max(param.num_elements for param in units.params) * 4  # a norm is taken of a whole fp32 tensor
    if separate_memory:
        return HostBudget(total=total, compute=OVERHEAD_BYTES + largest)
    busiest = max(
        _block_bytes(layouts, max_tokens, dtype), _outer_bytes(units, layouts, max_tokens, dtype, head_chunks)
    )
    compute = OVERHEAD_BYTES + round(busiest * _ALLOCATOR_SLACK)
    return HostBudget(total=total, compute=compute, slack=_ALLOCATOR_SLACK)


def hidden_size(model: nn.Module, units: Units) -> int:
    """Elements of one token between two blocks."""
    config = getattr(model, "config", None)
    for name in ("hidden_size", "n_embd", "d_model"):
        size = getattr(config, name, None)
        if isinstance(size, int):
            return size
    tables = [param.shape for param in units.embedding.params if len(param.shape) == 2]
    return max((shape[1] for shape in tables), default=max(min(p.shape) for p in units.params if p.shape))


def _block_bytes(layouts: Sequence[UnitLayout], tokens: int, dtype: torch.dtype) -> int:
    most = 0
    for layout in layouts[1:-1]:
        weights = layout.pieces.num_elements * dtype.itemsize
        cast = weights if dtype != layout.wire else 0
        widest = max((param.num_elements for param in layout.spec.params), default=0) * dtype.itemsize
        wide = sum(sum(param.shape[-2:]) for param in layout.spec.params if len(param.shape) >= 2)
        most = max(most, cast + weights + widest + _BLOCK_COPIES * wide * tokens * dtype.itemsize)
    return most


def _outer_bytes(units: Units, layouts: Sequence[UnitLayout], tokens: int, dtype: torch.dtype, head_chunks: int) -> int:
    """Head and embedding: weights, gradients (a tied one is held twice), logits."""
    size = dtype.itemsize
    tied = sum(param.num_elements for param in units.embedding.params if param.name in units.tied) * size
    head = layouts[-1].pieces.num_elements * size
    embedding = layouts[0].pieces.num_elements * size
    cast = 1 if dtype != layouts[0].wire else 0
    words = max(
        (param.shape[0] for param in (*units.head.params, *units.embedding.params) if len(param.shape) == 2), default=0
    )
    logits = head_bytes(tokens, words, head_chunks)
    at_head = (1 + cast) * (head + tied) + logits
    at_embedding = 2 * embedding + tied + (embedding if cast else 0)
    return math.ceil(max(at_head, at_embedding))
