"""This machine as a MachineProfile: the rates of the very code that will run.

Every part is measured by running it: a block through the engine's compute, pieces through the updater, records through
a store on each drive. What `virtual` was told about itself is taken as given. One part at a time, so that no rate is
that of two things fighting; what they do to each other is the simulator's business.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from lohan.doctor.drives import find_facts
from lohan.doctor.mounts import parse_mountinfo
from lohan.engine.devices import Device, VirtualDevice, VirtualOptions, open_device
from lohan.engine.memory import bound_allocator
from lohan.engine.settings import Settings
from lohan.errors import ConfigError
from lohan.measure.block_rate import BlockRate, BlockShape, choose_shape, measure_block
from lohan.measure.lane_overhead import measure_op_seconds
from lohan.measure.link_rate import COPY_BYTES, LinkRates, measure_links
from lohan.measure.store_rate import (
    STORE_BYTES,
    StoreRate,
    SustainedRate,
    check_space,
    measure_store,
    measure_sustained,
)
from lohan.measure.traffic import Traffic, open_traffic
from lohan.measure.update_rate import measure_update
from lohan.optim import Updater
from lohan.plan.drives import drive_rates
from lohan.plan.pieces import PIECE_ELEMENTS
from lohan.profiles import DriveProfile, MachineProfile
from lohan.sizes import format_bytes
from lohan.store.rates import DriveRate
from lohan.train.config_example import free_ram

Progress = Callable[[str, float], None]
"""What is being measured now, and the share of everything that is done."""

NEVER_THE_LIMIT = 1e12
"""Bytes per second of a link that does not exist."""

_SHORTFALL = 0.95
"""Drives that together reach less than this of what each promises alone are held back by something before them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is moved while measuring. Less is for tests: it says little about the machine."""

    store_bytes: int = STORE_BYTES
    """Of the temporary store on each drive."""

    piece_elements: int = PIECE_ELEMENTS
    """Parameters updated at a time. A model of smaller tensors has smaller pieces."""

    sustained_bytes: int | None = None
    """The most that a long write writes; None: half of what is free."""


def profile_machine(
    directories: Sequence[str | Path],
    *,
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    tokens: int | None = None,
    hidden_size: int | None = None,
    seconds: float = 20.0,
    sustained: bool = False,
    progress: Progress | None = None,
    gpu_memory: int | None = None,
    virtual: VirtualOptions | None = None,
    sizes: Sizes | None = None,
) -> MachineProfile:
    """Measure for about `seconds`: the device, the cores, and the drive of each directory.

    `dtype` is what blocks compute in (the device's default if left out), `tokens` the size of a micro-batch and
    `hidden_size` that of the block: a small model's is slower than the one that is measured otherwise. With
    `sustained` each drive is then written to until its fast cache is full, which can take minutes and wears it by what
    is written. Files are written to folders of their own inside the directories and removed again.
    """
    paths, sizes = check_directories(directories), sizes or Sizes()
    check_space(paths, sizes.store_bytes * len(paths))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = Settings(compute_dtype=dtype)
    host_bytes = free_ram()
    notes: list[str] = []
    steps = _Steps(progress or (lambda what, share: None), seconds, len(paths), sustained)
    bound_allocator()  # as a run does: it changes what allocating costs
    with ExitStack() as owned:
        opened = owned.enter_context(open_device(device, memory_bytes=gpu_memory, options=virtual))
        gpu_bytes = _device_memory(opened, host_bytes)
        traffic = _traffic(paths, sizes, steps, owned)
        shape = choose_shape(opened, settings.compute(opened.name), tokens, hidden_size)
        block = _block(opened, settings, shape, steps, notes, traffic)
        links = _links(opened, steps)
        updater = Updater(settings.make_optimizer(), settings.make_format(), settings.wire)
        update = measure_update(
            updater, seconds=steps.begin("update", 3), piece_elements=sizes.piece_elements, traffic=traffic,
            computing=not opened.separate_memory,
        )  # fmt: skip
    op_seconds = measure_op_seconds(steps.begin("lanes", 0.3))
    drives: list[DriveProfile] = []
    stores: list[StoreRate] = []

    def through_store(what: str, places: Sequence[Path], weights: Sequence[float] | None = None) -> StoreRate:
        share = steps.begin(what, steps.drive_seconds)
        return measure_store(places, seconds=share, num_bytes=sizes.store_bytes, weights=weights, tell=steps.tell)

    for number, path in enumerate(paths):
        stores.append(through_store(f"drive {path}", [path]))
        drives.append(_drive(paths, number, stores[-1], notes))
    array = None
    if len(paths) > 1:
        shares = [DriveRate(read=one.read, write=one.write, direct=True).weight for one in stores]
        stores.append(through_store("all drives together", paths, shares))
        array = array_limit(drives, stores[-1])
    if sustained:
        for number, path in enumerate(paths):
            steps.begin(f"long write to {path}", steps.sustained_weight)
            long = measure_sustained(path, num_bytes=sizes.sustained_bytes, tell=steps.tell)
            drives[number] = after_long_write(drives[number], long, notes)
    steps.end()
    singles = block.singles or (stores[-1].singles if stores else None)
    cpu = sum(one.cpu_seconds_per_byte for one in stores) / len(stores) if stores else 0.0
    return MachineProfile(
        name=platform.node() or "this machine",
        gpu_name=_device_name(opened),
        gpu_flops_per_second=_figure(block.flops_per_second),
        gpu_memory_bytes=gpu_bytes,
        separate_memory=opened.separate_memory,
        to_gpu_bytes_per_second=_figure(links.to_gpu),
        to_host_bytes_per_second=_figure(links.to_host),
        duplex_share=_figure(links.duplex_share),
        host_memory_bytes=host_bytes,
        drives=tuple(drives),
        array_bytes_per_second=None if array is None else _figure(array),
        update_parameters_per_second=_figure(update.parameters_per_second),
        norm_share=_figure(update.norm_share),
        weights_seconds_per_parameter=_figure(block.weights_seconds_per_parameter),
        saved_by_keeping=_figure(block.saved_by_keeping),
        checksum_bytes_per_second=_figure(num_cores() / cpu) if cpu else None,
        compute_beside_drives=None if block.shares is None else _figure(block.shares.work),
        drives_beside_compute=None if block.shares is None else _figure(block.shares.drives),
        update_beside_drives=None if update.shares is None else _figure(update.shares.work),
        drives_beside_update=None if update.shares is None else _figure(update.shares.drives),
        single_read_bytes_per_second=None if singles is None else _figure(singles[0]),
        single_write_bytes_per_second=None if singles is None else _figure(singles[1]),
        single_mixed_bytes_per_second=None if singles is None else _figure(singles[2]),
        commit_seconds=_figure(max(one.commit_seconds for one in stores)) if stores else 0.0,
        op_seconds=_figure(op_seconds),
        notes="; ".join(notes),
    )


def check_directories(directories: Sequence[str | Path]) -> list[Path]:
    """The directories, if each is a different one that can be written to; a ConfigError with what to do if not."""
    paths = [Path(directory) for directory in directories]
    mountinfo = Path("/proc/self/mountinfo")
    mounts = parse_mountinfo(mountinfo.read_text()) if mountinfo.exists() else []
    seen: dict[str, Path] = {}
    for path in paths:
        facts = find_facts(str(path), mounts)
        if facts.problem:
            raise ConfigError(f"{path} {facts.problem}. {facts.advice}")
        real = os.path.realpath(path)
        if real in seen:
            raise ConfigError(f"{path} and {seen[real]} are the same directory. Name one directory per drive.")
        seen[real] = path
    return paths


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def array_limit(drives: Sequence[DriveProfile], together: StoreRate) -> float | None:
    """What holds all drives back together, if something does: then no kind of traffic gets past the best seen."""
    alone = drive_rates(drives)
    promised = (alone.read, alone.write, alone.both_read + alone.both_write)
    reached = (together.read, together.write, together.mixed)
    if all(found >= _SHORTFALL * wanted for found, wanted in zip(reached, promised, strict=True)):
        return None
    return max(reached)


def after_long_write(drive: DriveProfile, long: SustainedRate, notes: list[str]) -> DriveProfile:
    """The drive as a long write found it: its steady rate, and where its fast cache ends."""
    written = f"{format_bytes(long.written_bytes)} written to {drive.name} in {long.seconds:.0f} s"
    if long.writes.burst is None:
        notes.append(f"{written}: no cliff")
        mixed = drive.mixed_bytes_per_second
    else:
        notes.append(written if long.writes.settled else f"{written}, and the rate had not settled")
        mixed = _figure(long.mixed)
    return DriveProfile(
        name=drive.name,
        read_bytes_per_second=drive.read_bytes_per_second,
        write_bytes_per_second=_figure(long.writes.sustained),
        mixed_bytes_per_second=mixed,
        capacity_bytes=drive.capacity_bytes,
        burst_write_bytes_per_second=None if long.writes.burst is None else _figure(long.writes.burst),
        burst_bytes=long.writes.burst_bytes,
    )


class _Steps:
    """Shares the time out between the parts, and tells how far it all is."""

    def __init__(self, progress: Progress, seconds: float, num_drives: int, sustained: bool):
        self._progress, self._scale = progress, seconds / 20.0
        num_stores = num_drives + (num_drives > 1)
        self.drive_seconds = 8.0 / max(1, num_stores)
        self.sustained_weight = 60.0
        self._total = 1 + 5 + 2 + 3 + 0.3 + 8.0 * bool(num_drives) + self.sustained_weight * num_drives * sustained
        self._done, self._current, self._what = 0.0, 0.0, ""

    def begin(self, what: str, weight: float) -> float:
        """Start the next part; returns the seconds it may take."""
        self._done, self._current, self._what = self._done + self._current, weight, what
        self.tell(0.0)
        return weight * self._scale

    def tell(self, share: float) -> None:
        """How much of the current part is done."""
        self._progress(self._what, min(1.0, (self._done + share * self._current) / self._total))

    def end(self) -> None:
        self._progress("done", 1.0)


def _traffic(paths: Sequence[Path], sizes: Sizes, steps: _Steps, owned: ExitStack) -> Traffic | None:
    if not paths:
        return None
    seconds = steps.begin("traffic", 1)
    return owned.enter_context(open_traffic(paths, seconds=seconds, num_bytes=sizes.store_bytes))


def _block(
    device: Device,
    settings: Settings,
    shape: BlockShape,
    steps: _Steps,
    notes: list[str],
    traffic: Traffic | None,
) -> BlockRate:
    dtype = settings.compute(device.name)
    seconds = steps.begin("block", 5)
    given = device.options.flops_per_second if isinstance(device, VirtualDevice) else None
    if given is not None:
        # `virtual` waits out what the schedule counts and nothing else.
        return BlockRate(flops_per_second=given, weights_seconds_per_parameter=0.0, saved_by_keeping=1.0, shape=shape)
    found = measure_block(
        device, shape, dtype=dtype, wire=settings.wire, seconds=seconds, traffic=traffic, tell=steps.tell
    )
    name = str(dtype).removeprefix("torch.")
    notes.append(
        f"block of {shape.num_parameters / 1e6:.3g}M parameters in {name}, {shape.rows * shape.columns} tokens"
    )
    return found


def _links(device: Device, steps: _Steps) -> LinkRates:
    seconds = steps.begin("links", 2)
    if not device.separate_memory:
        return LinkRates(to_gpu=NEVER_THE_LIMIT, to_host=NEVER_THE_LIMIT, duplex_share=1.0)
    given = device.options if isinstance(device, VirtualDevice) else VirtualOptions()
    to_gpu, to_host = given.to_gpu_bytes_per_second, given.to_host_bytes_per_second
    if to_gpu is not None and to_host is not None:
        return LinkRates(to_gpu=to_gpu, to_host=to_host, duplex_share=1.0)
    budget = device.memory_budget
    size = COPY_BYTES if budget is None else max(1 << 20, min(COPY_BYTES, budget // 4))
    found = measure_links(device, seconds=seconds, num_bytes=size)
    return LinkRates(to_gpu=to_gpu or found.to_gpu, to_host=to_host or found.to_host, duplex_share=found.duplex_share)


def _drive(paths: Sequence[Path], number: int, rate: StoreRate, notes: list[str]) -> DriveProfile:
    path = paths[number]
    usage = os.statvfs(path)
    sharing = sum(os.stat(other).st_dev == os.stat(path).st_dev for other in paths)
    if not rate.direct:
        notes.append(f"{path} refuses direct I/O: its rates are those of the page cache")
    return DriveProfile(
        name=_drive_name(path),
        read_bytes_per_second=_figure(rate.read),
        write_bytes_per_second=_figure(rate.write),
        mixed_bytes_per_second=_figure(rate.mixed),
        capacity_bytes=usage.f_bavail * usage.f_frsize // sharing,
    )


def _drive_name(path: Path) -> str:
    """The model of the disk under a path, or its kernel name, or the path."""
    mountinfo = Path("/proc/self/mountinfo")
    mounts = parse_mountinfo(mountinfo.read_text()) if mountinfo.exists() else []
    disks = sorted(find_facts(str(path), mounts).disks)
    names = []
    for disk in disks:
        try:
            names.append(Path(f"/sys/block/{disk}/device/model").read_text().strip() or disk)
        except OSError:
            names.append(disk)
    return ", ".join(names) or str(path)


def _device_memory(device: Device, host_bytes: int) -> int:
    if device.memory_budget is not None:
        return device.memory_budget
    if device.torch_device.type == "cuda":
        return int(torch.cuda.mem_get_info(device.torch_device)[0])
    return host_bytes


def _device_name(device: Device) -> str:
    name = device.describe().get("gpu")
    return str(name) if name else device.name


def _figure(value: float) -> float:
    """Four digits: the rest is noise, and a file should be readable."""
    return float(f"{value:.4g}")
