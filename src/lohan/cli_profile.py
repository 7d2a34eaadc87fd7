"""`lohan profile`: measure this machine and write it down as YAML. Heavy imports happen inside the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.errors import ConfigError

if TYPE_CHECKING:
    from lohan.profiles import MachineProfile


def profile(
    ssd: Annotated[list[Path], typer.Option(metavar="PATH...", help="A directory on each SSD a run will use.")],
    more: Annotated[list[Path] | None, typer.Argument(metavar="", hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the machine here, as YAML.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or virtual.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(metavar="bf16|fp16|fp32", help="What blocks compute in. By default the device's own.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a micro-batch. By default what suits the device.")
    ] = None,
    sustained: Annotated[
        bool,
        typer.Option(
            "--sustained",
            help="Also write to each drive until its fast cache is full: up to 10 minutes and half of its free space.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure this machine in about 20 s: its device, its cores, its drives. `--ssd A B` names several drives."""
    if out is not None and not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no directory {out.resolve().parent}. Make it, or name another file.")
    directories = [*ssd, *(more or [])]
    from lohan.measure.machine import check_directories, profile_machine

    check_directories(directories)
    with _bar() as progress:
        machine = profile_machine(
            directories, device=device, dtype=dtype, tokens=tokens, sustained=sustained, progress=progress
        )
    if out is not None:
        write_machine(machine, out)
    if as_json:
        import json

        from lohan.hardware import machine_to_dict

        print(json.dumps(machine_to_dict(machine), indent=2))
        return
    _print_machine(machine, directories)
    if out is not None:
        print(f"\nWritten to {out}. Estimate a run on this machine with: lohan estimate --machine {out}")
    else:
        print("\nKeep it with: --out machine.yaml")


def write_machine(machine: MachineProfile, path: Path) -> None:
    """As YAML that load_machine() reads back; the file appears when it is complete."""
    import yaml

    from lohan import __version__
    from lohan.hardware import machine_to_dict

    text = yaml.safe_dump(machine_to_dict(machine), sort_keys=False, allow_unicode=True, width=120)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(f"# Measured by lohan {__version__} profile. Rates per second, sizes in bytes.\n{text}")
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}. Name another file.") from None


def _print_machine(machine: MachineProfile, directories: Sequence[Path]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in machine_rows(machine):
        table.add_row(name, escape(value))
    console.print(table, highlight=False)
    drives = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("directory", "drive", "read", "write", "both at once", "free", "fast cache"):
        drives.add_column(heading, overflow="fold")
    for directory, drive in zip(directories, machine.drives, strict=True):
        drives.add_row(escape(str(directory)), *map(escape, drive_cells(drive)))
    console.print()
    console.print(drives, highlight=False)
    if machine.array_bytes_per_second is not None:
        console.print(
            f"\nTogether the drives reach {_per_second(machine.array_bytes_per_second)}, less than each promises "
            "alone: they share a disk or a bus.",
            highlight=False,
        )
    if machine.notes:
        console.print(f"\n[dim]{escape(machine.notes)}[/]", highlight=False)


def machine_rows(machine: MachineProfile) -> list[tuple[str, str]]:
    """What was measured, for people; links only where there are any."""
    from lohan.sizes import format_bytes

    rows = [
        ("device", f"{machine.gpu_name}, {format_bytes(machine.gpu_memory_bytes)} free"),
        ("a block computes", _flops(machine.gpu_flops_per_second)),
        ("keeping operators", f"saves {machine.saved_by_keeping:.0%} of the time to compute them again"),
        ("installing weights", f"{machine.weights_seconds_per_parameter * 1e9:.3g} s per billion parameters"),
    ]
    if machine.separate_memory:
        share = machine.duplex_share
        rows += [
            ("to the device", _per_second(machine.to_gpu_bytes_per_second)),
            ("to the host", f"{_per_second(machine.to_host_bytes_per_second)}; both at once {share:.0%} of each"),
        ]
    rows += [
        ("updates", f"{machine.update_parameters_per_second / 1e6:.3g} million parameters/s"),
        ("norms", "not measured" if machine.norm_share is None else f"{machine.norm_share:.0%} of an update's time"),
    ]
    if machine.checksum_bytes_per_second is not None:
        rows.append(("cores serve drives", f"at most {_per_second(machine.checksum_bytes_per_second)}"))
    beside = [("computing", machine.compute_beside_drives, machine.drives_beside_compute)]
    beside.append(("updating", machine.update_beside_drives, machine.drives_beside_update))
    for work, own, drives in beside:
        if own is not None and drives is not None:
            rows.append((f"{work} beside traffic", f"keeps {own:.0%} of its rate, the drives {drives:.0%} of theirs"))
    if machine.single_read_bytes_per_second is not None and machine.single_write_bytes_per_second is not None:
        one = (machine.single_read_bytes_per_second, machine.single_write_bytes_per_second)
        said = "reads {}, writes {}".format(*map(_per_second, one))
        if machine.single_mixed_bytes_per_second is not None:
            said += f", both at once {_per_second(machine.single_mixed_bytes_per_second)}"
        rows.append(("one record at a time", said))
    if machine.drives and machine.commit_seconds:
        rows.append(("a commit takes", f"{machine.commit_seconds * 1e3:.3g} ms"))
    return [
        *rows,
        ("an operation costs", f"{machine.op_seconds * 1e6:.0f} µs"),
        ("memory", f"{format_bytes(machine.host_memory_bytes)} free"),
    ]


def drive_cells(drive: Any) -> list[str]:
    """One drive's row of the table, after its directory."""
    from lohan.sizes import format_bytes

    cache = "not looked for"
    if drive.burst_write_bytes_per_second is not None:
        cache = f"{format_bytes(drive.burst_bytes)} at {_per_second(drive.burst_write_bytes_per_second)}"
    return [
        drive.name,
        _per_second(drive.read_bytes_per_second),
        _per_second(drive.write_bytes_per_second),
        "" if drive.mixed_bytes_per_second is None else _per_second(drive.mixed_bytes_per_second),
        "" if drive.capacity_bytes is None else format_bytes(drive.capacity_bytes),
        cache,
    ]


def _per_second(rate: float) -> str:
    from lohan.sizes import format_bytes

    return f"{format_bytes(rate)}/s"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """A progress bar to be told what is measured now and the share that is done; on stderr, only on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("Measuring {task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
