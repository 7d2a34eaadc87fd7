"""The catalogue: what parts a machine can be made of, with where each number is from and when it was true.

Rates of GPUs are dense fp16/bf16 with fp32 accumulation, as the makers state them: a real block reaches less. Consumer
drives have two write rates, of the data sheet (their fast cache) and sustained (when it is full).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

import yaml

from lohan.profiles import DriveProfile
from lohan.sizes import parse_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One graphics card or accelerator."""

    name: str
    flops_per_second: float
    memory_bytes: int
    link: str
    """The name of its link to the host."""

    power_watts: float
    price: float | None = None
    price_date: str = ""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A kind of slot: PCIe of a generation and width."""

    name: str
    bytes_per_second: float
    """By the standard, one way, after encoding."""

    copied_bytes_per_second: float
    """What large copies from page-locked memory reach."""

    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """One model of SSD."""

    name: str
    read_bytes_per_second: float
    write_bytes_per_second: float
    """Sustained."""

    burst_write_bytes_per_second: float | None = None
    burst_bytes: int = 0
    capacity_bytes: int
    endurance_bytes: float
    price: float | None = None
    price_date: str = ""
    source: str

    def profile(self) -> DriveProfile:
        """For a MachineProfile."""
        return DriveProfile(
            name=self.name,
            read_bytes_per_second=self.read_bytes_per_second,
            write_bytes_per_second=self.write_bytes_per_second,
            capacity_bytes=self.capacity_bytes,
            burst_write_bytes_per_second=self.burst_write_bytes_per_second,
            burst_bytes=self.burst_bytes,
            endurance_bytes=self.endurance_bytes,
            price=self.price,
        )


@cache
def load_gpus() -> dict[str, Gpu]:
    """By name."""
    return {one.name: one for one in _load("gpus", Gpu)}


@cache
def load_links() -> dict[str, Link]:
    return {one.name: one for one in _load("links", Link)}


@cache
def load_drives() -> dict[str, Drive]:
    return {one.name: one for one in _load("drives", Drive)}


def _load(name: str, kind: Any) -> Iterable[Any]:
    text = (resources.files("lohan.hardware") / f"{name}.yaml").read_text()
    sizes = {one.name for one in fields(kind) if str(one.type) == "int"}
    for entry in yaml.safe_load(text):
        values = {key: parse_size(value, name=key) if key in sizes else _number(value) for key, value in entry.items()}
        yield kind(**values)


def _number(value: Any) -> Any:
    return str(value) if hasattr(value, "isoformat") else value
