"""Which kernel may do an update: one that has given the bits of the torch operators for the same optimizer, state
format and wire dtype, in this process, on random and on special values.

Another CPU, compiler or torch may round differently; here it is found out, and torch does the work. Safe from any
thread.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lohan.optim.formats import ArraySpec, StateFormat
from lohan.optim.native.build import Unavailable, build
from lohan.optim.native.kernel import DTYPES, Kernel, Numbers, Range, Update
from lohan.optim.optimizers import Adam, AdamW, Optimizer
from lohan.optim.rounding import round_to_wire, split_master

SWITCH = "LOHAN_NATIVE"
"""With 0 for this in the environment, torch does every update."""

LANES = (8, 16, 4)
"""How many floats torch's vector loop may take at a time: with AVX2, AVX-512, NEON. The test finds out which."""

_found: dict[object, Kernel | str] = {}
_lock = threading.Lock()


class ByTorch(Protocol):
    """The update by torch operators, on a range of the elements."""

    def __call__(
        self, wire: Tensor, arrays: Mapping[str, Tensor], grad: Tensor, within: Range, numbers: Numbers, /
    ) -> None: ...


def find_kernel(optimizer: Optimizer, state_format: StateFormat, wire_dtype: torch.dtype, by_torch: ByTorch) -> Kernel:
    """A kernel that gives the bits of `by_torch`. Raises Unavailable."""
    if is_switched_off():
        raise Unavailable(f"{SWITCH} is 0")
    specs = state_format.arrays(optimizer.moments, wire_dtype)
    if not _is_known(optimizer, state_format, specs):
        raise Unavailable(f"it does not know {optimizer.name} with state_format {state_format.name}")
    assert isinstance(optimizer, Adam)
    key = (optimizer, specs, wire_dtype)
    with _lock:  # one thread compiles and tests, the others wait for what it finds
        if key not in _found:
            try:
                _found[key] = _tested(load(), optimizer, specs, wire_dtype, by_torch)
            except Unavailable as reason:
                _found[key] = str(reason)
        found = _found[key]
    if isinstance(found, str):
        raise Unavailable(found)
    return found


def is_switched_off() -> bool:
    return os.environ.get(SWITCH) == "0"


def forget() -> None:
    """Look again at the next call: for tests, which change the machine."""
    with _lock:
        _found.clear()


def _is_known(optimizer: Optimizer, state_format: StateFormat, specs: tuple[ArraySpec, ...]) -> bool:
    """A rule or a format that someone else wrote may do anything; only what this package wrote is known."""
    return (
        type(optimizer) in (Adam, AdamW)
        and type(state_format).unpack is StateFormat.unpack
        and type(state_format).pack is StateFormat.pack
        and all(spec.name in ("remainder", "master") or spec.dtype in DTYPES for spec in specs)
    )


def load() -> ctypes.CDLL:
    """The library, compiled if need be. Raises Unavailable."""
    path = build()
    try:
        library = ctypes.CDLL(str(path))
        library.lohan_update.argtypes = (
            ctypes.POINTER(Update), ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64),
        )  # fmt: skip
        library.lohan_update.restype = ctypes.c_int32
        library.lohan_split.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        library.lohan_split.restype = None
        library.lohan_norm.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)
        library.lohan_norm.restype = ctypes.c_float
    except (OSError, AttributeError) as error:
        raise Unavailable(f"it could not be loaded: {error}") from error
    return library


# -- the test ---------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    wire: Tensor
    arrays: dict[str, Tensor]
    grad: Tensor
    numbers: Numbers
    ordinary: bool
    """No zero and nothing very large or small: no NaN can come up."""

    @property
    def tensors(self) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return self.wire, self.arrays, self.grad

    def copy(self) -> _Case:
        arrays = {name: array.clone() for name, array in self.arrays.items()}
        return self._replace(wire=self.wire.clone(), arrays=arrays)

    def bits(self) -> list[bytes]:
        return [bytes(tensor.view(torch.uint8).numpy()) for tensor in (self.wire, *self.arrays.values())]


def _tested(
    library: ctypes.CDLL, optimizer: Adam, specs: tuple[ArraySpec, ...], wire_dtype: torch.dtype, by_torch: ByTorch
) -> Kernel:
    cases = list(_cases(specs, wire_dtype))
    expected = []
    for case in cases:
        done = case.copy()
        by_torch(*done.tensors, (0, done.wire.numel()), done.numbers)
        expected.append(done.bits())
    if not _splits(Kernel(library, optimizer, LANES[0])):
        raise Unavailable("its bits are not torch's on this machine")
    for lanes in LANES:
        kernel = Kernel(library, optimizer, lanes)
        if all(
            _by_kernel(kernel, case.copy(), by_torch) == wanted for case, wanted in zip(cases, expected, strict=True)
        ):
            return kernel
    raise Unavailable("its bits are not torch's on this machine")


def _splits(kernel: Kernel) -> bool:
    """Whether it cuts masters as torch does: random ones, and every pattern of the bits that matter."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    master = (upper[:, None] | lower[None, :]).view(-1).view(torch.float32)
    wires = [torch.empty(master.numel(), dtype=torch.bfloat16) for _ in range(2)]
    remainders = [torch.empty(master.numel(), dtype=torch.int16) for _ in range(2)]
    kernel.split(master, wires[0], remainders[0])
    split_master(master, wires[1], remainders[1])
    return torch.equal(wires[0].view(torch.int16), wires[1].view(torch.int16)) and torch.equal(*remainders)


def _by_kernel(kernel: Kernel, case: _Case, by_torch: ByTorch) -> list[bytes]:
    """The bits after an update by the kernel; none where it left to torch what it should do itself."""
    rest = kernel.update(*case.tensors, case.numbers)
    if rest and case.ordinary:
        return []
    for within in rest:
        by_torch(*case.tensors, within, case.numbers)
    return case.bits()


_NUMBERS = (
    Numbers(1, 1e-3, 0.1),
    Numbers(7, 0.3, 0.0, (0.3,)),
    Numbers(1000, 3e-5, 0.01, (1 / 3, torch.tensor(0.7))),
    Numbers(2, 0.0, 0.0),
)
_SIZES = (
    # power of two, spread of powers, lengths: ordinary, mixed, subnormal, squares near the largest number
    (0, 0, (1027, 604, 1027, 13)),
    (-4, 16, (604, 1027)),
    (-135, 20, (1027, 604)),
    (60, 6, (1027,)),
    # With infinities NaNs come up at once and end the kernel's part, so these are short.
    (0, 300, (1, 9, 77, 130, 64)),
)
"""Few: with several threads each of these calls of torch waits for all of them, and on a busy machine that is long."""


def _cases(specs: tuple[ArraySpec, ...], wire_dtype: torch.dtype) -> Iterator[_Case]:
    generator = torch.Generator().manual_seed(0)
    turns = itertools.cycle(_NUMBERS)
    for power, spread, lengths in _SIZES:
        for num, numbers in zip(lengths, turns, strict=False):
            for grad_dtype in dict.fromkeys((wire_dtype, torch.float32)):
                wire, grad = torch.empty(num, dtype=wire_dtype), _values(num, power, spread, generator).to(grad_dtype)
                arrays = {spec.name: torch.empty(num, dtype=spec.dtype) for spec in specs}
                for array in arrays.values():
                    array.copy_(_values(num, power, spread, generator))
                arrays["exp_avg_sq"].abs_()
                master = _values(num, power, spread, generator)
                master.view(torch.int32)[::7] &= -0x10000
                master.view(torch.int32)[::7] |= 0x8000  # a tie on a bf16 wire, unless the weight moves
                round_to_wire(master, wire)
                if "remainder" in arrays:
                    split_master(master, wire, arrays["remainder"])
                yield _Case(wire, arrays, grad, numbers, spread == 0)


def _values(num: int, power: int, spread: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(num, generator=generator)
    if spread == 0:
        return drawn
    drawn *= torch.exp2(power + spread * (torch.rand(num, generator=generator) - 0.5))
    return drawn * (torch.rand(num, generator=generator) > 0.05)  # zeros of both signs
