"""The processor as the device: host memory is device memory, and nothing is copied.

Work is finished when the call returns, so lanes need nothing. What compute holds comes out of `host_memory`; there
is no separate budget and nothing is counted here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lohan.engine.cores import copy_bytes
from lohan.engine.devices.base import NOTHING, Device, check_copy


class CpuDevice(Device):
    """Computes where the bytes already are."""

    name = "cpu"
    separate_memory = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def lane(self, name: str) -> AbstractContextManager[None]:
        return NOTHING

    def compute(self, flops: float) -> AbstractContextManager[None]:
        return NOTHING

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free(self, tensor: Tensor) -> None:
        pass  # it goes with its last reference

    def to_device(self, host: Tensor, device: Tensor) -> None:
        _copy(host, device)

    def to_host(self, device: Tensor, host: Tensor) -> None:
        _copy(device, host)


def _copy(source: Tensor, target: Tensor) -> None:
    check_copy(source, target)
    if source.data_ptr() != target.data_ptr():
        copy_bytes(source, target)
