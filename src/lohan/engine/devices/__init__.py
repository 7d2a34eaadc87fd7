"""Where a model computes: `cpu`, `virtual` or `cuda`, behind one interface (base.py says what it promises)."""

from __future__ import annotations

import re

from lohan.engine.devices.base import Device
from lohan.engine.devices.cpu import CpuDevice
from lohan.engine.devices.virtual import VirtualDevice, VirtualOptions
from lohan.errors import ConfigError, DeviceOutOfMemory

__all__ = ["CpuDevice", "Device", "DeviceOutOfMemory", "VirtualDevice", "VirtualOptions", "open_device"]


def open_device(name: str, *, memory_bytes: int | None, options: VirtualOptions | None = None) -> Device:
    """The device of this name, ready for use. Close it, or use it in `with`."""
    if memory_bytes is not None and memory_bytes <= 0:
        raise ConfigError(f"gpu_memory is {memory_bytes}; write how much the device may use, like 20GB.")
    if options is not None and name != "virtual":
        raise ConfigError(f"Rates and delays can only be set on device: virtual, not on device: {name}.")
    if name == "virtual":
        return VirtualDevice(memory_bytes, options)
    if name == "cpu":
        if memory_bytes is not None:
            raise ConfigError("gpu_memory has no meaning on device: cpu, where host_memory covers all. Leave it out.")
        return CpuDevice()
    if re.fullmatch(r"cuda(:\d+)?", name):
        from lohan.engine.devices.cuda import open_cuda

        return open_cuda(name, memory_bytes)
    raise ConfigError(f"There is no device {name!r}. Write cpu, cuda, cuda:1 (the second GPU) or virtual.")
