"""Machines as YAML: a MachineProfile's own names, sizes as people write them, drives with a count.

    name: my-pc
    gpu_flops_per_second: 140.0e+12
    gpu_memory: 24GB
    ...
    drives:
      - {name: Samsung 990 Pro 2TB, count: 2, read_bytes_per_second: 7.0e+9, write_bytes_per_second: 1.5e+9}

A machine of the package is asked for by name, any other by its path. machine_to_dict and machine_from_dict are each
other's inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, replace
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from lohan.errors import ConfigError
from lohan.nearest import did_you_mean
from lohan.profiles import DriveProfile, MachineProfile
from lohan.sizes import parse_size

_SIZES = {"gpu_memory": "gpu_memory_bytes", "host_memory": "host_memory_bytes", "capacity": "capacity_bytes"}
_TEXT = ("name", "gpu_name", "notes")
_MEASURE = "Measure this machine with: lohan profile --ssd PATH --out machine.yaml"


def machine_names() -> list[str]:
    """Machines that come with the package."""
    folder = resources.files("lohan.hardware") / "machines"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_machine(name_or_path: str | Path) -> MachineProfile:
    """A machine of the package, or one from a YAML file."""
    name = str(name_or_path)
    if name in machine_names():
        text = (resources.files("lohan.hardware") / "machines" / f"{name}.yaml").read_text()
    elif Path(name).is_file():
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} cannot be read: {error}. {_MEASURE}") from None
    else:
        raise ConfigError(
            f"There is no machine file {name!r} and no machine of that name. Known are: {', '.join(machine_names())}.\n"
            f"{_MEASURE}"
        )
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = name if mark is None else f"{name}, line {mark.line + 1}"
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{place}: this is not YAML: {why}. {_MEASURE}") from None
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{name} does not describe a machine: it holds no names and values. {_MEASURE}")
    try:
        return machine_from_dict(loaded, where=name)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{_MEASURE}") from None


def machine_from_dict(values: Mapping[str, Any], *, where: str = "machine") -> MachineProfile:
    """A machine from plain values; ConfigError names what is wrong and where."""
    drives: list[DriveProfile] = []
    listed = values.get("drives") or []
    if not isinstance(listed, list) or not all(isinstance(entry, Mapping) for entry in listed):
        raise ConfigError(
            f"{where}: drives is a list; each entry has read_bytes_per_second and write_bytes_per_second."
        )
    for number, entry in enumerate(listed, 1):
        count = entry.get("count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"{where}: drive {number} has count {count!r}; it is a whole number.")
        rest = {key: value for key, value in entry.items() if key != "count"}
        drives += [_make(DriveProfile, rest, f"{where}: drive {number}")] * count
    rest = {key: value for key, value in values.items() if key != "drives"}
    made: MachineProfile = _make(MachineProfile, rest, where, drives=tuple(drives))
    return made


def machine_to_dict(machine: MachineProfile) -> dict[str, Any]:
    """Plain values for a YAML file; what has its default is left out."""
    values = _plain(machine)
    values["drives"] = [_plain(drive) | {"count": len(list(group))} for drive, group in groupby(machine.drives)]
    return values


def resize(
    machine: MachineProfile,
    *,
    gpus: int | None = None,
    ssds: int | None = None,
    host_memory_bytes: int | None = None,
    gpu_memory_bytes: int | None = None,
) -> MachineProfile:
    """The same machine with more or fewer of its parts; further drives are like its last one."""
    drives = machine.drives
    if ssds is not None:
        if ssds and not drives:
            raise ConfigError(f"{machine.name} has no drive to take {ssds} of. Describe one under drives.")
        drives = (*drives[:ssds], *[drives[-1]] * (ssds - len(drives)))
    return replace(
        machine,
        gpus=machine.gpus if gpus is None else gpus,
        drives=drives,
        host_memory_bytes=machine.host_memory_bytes if host_memory_bytes is None else host_memory_bytes,
        gpu_memory_bytes=machine.gpu_memory_bytes if gpu_memory_bytes is None else gpu_memory_bytes,
    )


def _plain(profile: Any) -> dict[str, Any]:
    return {
        one.name: getattr(profile, one.name)
        for one in fields(profile)
        if one.name != "drives" and (one.default is MISSING or getattr(profile, one.name) != one.default)
    }


def _make(kind: Any, values: Mapping[str, Any], where: str, **more: Any) -> Any:
    known = {one.name: one for one in fields(kind)}
    made: dict[str, Any] = {}
    for key, value in values.items():
        name = _SIZES.get(key, key)
        if name not in known or name in more:
            hint = did_you_mean(str(key), known) or f" Known are: {', '.join(known)}."
            raise ConfigError(f"{where} has {key!r}, which is not known.{hint}")
        made[name] = _checked(known[name], value, f"{where}: {key}")
    missing = [n for n, one in known.items() if one.default is MISSING and n not in made and n not in more]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}.")
    return kind(**made, **more)


def _checked(one: Field[Any], value: Any, where: str) -> Any:
    if value is None and "None" in str(one.type):
        return None
    if one.name in _TEXT:
        return str(value)
    if one.name in _SIZES.values() and isinstance(value, str):
        return parse_size(value, name=where)
    if one.type == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is {value!r}; it is true or false.")
        return value
    try:
        number = float(value)  # YAML 1.1 reads 21e9 as text
    except (TypeError, ValueError):
        raise ConfigError(f"{where} is {value!r}; it is a number.") from None
    if not number >= 0 or (number == 0 and one.name.endswith("_per_second")):
        raise ConfigError(f"{where} is {value!r}; it is above 0.")
    return round(number) if "int" in str(one.type) else number
