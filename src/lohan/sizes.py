"""Byte sizes as people write them ("24GB", "512 MiB") and as we print them."""

from __future__ import annotations

import re

from lohan.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_size(value: str | int, *, name: str = "size") -> int:
    """Bytes from "24GB", "1.5 GiB", "4096" or a plain integer. GB is 10^9, GiB is 2^30."""
    if isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, which is not a size. Write it like 24GB or 512MiB.")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{name} is {value}, and a size cannot be negative.")
        return value
    match = _SIZE.fullmatch(value)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{name} is {value!r}, which is not a size. Write it like 24GB or 512MiB.")
    return round(float(match.group(1).replace("_", "")) * unit)


def format_bytes(num_bytes: float) -> str:
    """A size for people, in powers of 1000 as drives and RAM budgets are sold: 1536 -> '1.54 kB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 1000 or unit == "TB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    raise AssertionError("the loop returns at TB")
