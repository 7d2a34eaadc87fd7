"""An estimate for people: one table, or one row for each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lohan.estimate.estimate import Estimate, worth_buying
from lohan.plan.explain import LANE_NAMES
from lohan.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

_BOTTLENECKS = {
    "gpu": "the GPU",
    "ssd": "the drives",
    "cpu_update": "updates on the CPU",
    "to_gpu": "copies to the GPU",
    "to_host": "copies to RAM",
}


def print_estimate(console: Console, one: Estimate) -> None:
    """All that is known of one."""
    from rich.markup import escape
    from rich.table import Table

    head = f"[bold]{escape(one.model)}[/] ({one.parameters / 1e9:.3g}e9 parameters) on [bold]{escape(one.machine)}[/]"
    console.print(f"{head}, {one.strategy}", highlight=False)
    if not one.fits:
        console.print(f"[bold red]does not fit[/]  {escape(one.reason)}", highlight=False, soft_wrap=True)
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in _rows(one):
        table.add_row(name, escape(value))
    console.print(table, highlight=False)
    lanes = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    for heading in ("", "s per step", "of the step"):
        lanes.add_column(heading, justify="left" if not heading else "right")
    for lane, name in LANE_NAMES.items():
        seconds = one.lanes.get(lane, 0.0)
        if seconds > 0 and one.seconds_per_step:
            lanes.add_row(name, f"{seconds:.4g}", f"{seconds / one.seconds_per_step:.0%}")
    console.print()
    console.print(lanes, highlight=False)
    if one.upgrades:
        console.print("\nWhat would help, planned again:", highlight=False)
        for upgrade in sorted(one.upgrades, key=lambda u: -float(u["gain"])):
            console.print(
                f"  {upgrade['name']:<28}{upgrade['tokens_per_second']:>10.4g} tokens/s  {upgrade['gain'] - 1:>+5.0%}",
                highlight=False,
            )
    for note in one.notes:
        console.print(f"[yellow]note[/]  {escape(note)}", highlight=False, soft_wrap=True)


def _rows(one: Estimate) -> list[tuple[str, str]]:
    rows = [
        ("time per step", f"{one.seconds_per_step:.4g} s"),
        ("tokens per second", f"{one.tokens_per_second:.4g}  ({one.tflops_6n:.4g} TFLOPS per GPU, counted 6N)"),
        (
            "step",
            f"{one.tokens_per_step:,} tokens: {one.batch_size} sequences of {one.sequence_length}, "
            f"micro-batches of {one.micro_batch_size}",
        ),
        ("run", f"{one.steps:,} steps in {_hours(one.hours)}"),
        ("device memory", format_bytes(one.gpu_bytes or 0)),
        ("RAM", format_bytes(one.host_bytes or 0)),
        ("SSD", format_bytes(one.ssd_bytes or 0)),
        (
            "SSD per step",
            f"{format_bytes(one.ssd_read_bytes_per_step or 0)} read, "
            f"{format_bytes(one.ssd_write_bytes_per_step or 0)} written",
        ),
        (
            "drives' endurance",
            "not known" if one.endurance_share is None else f"{one.endurance_share:.2%} of what they are rated for",
        ),
    ]
    if one.energy_kwh is not None:
        rows.append(("energy", f"{one.energy_kwh:.4g} kWh"))
    if one.cost_per_billion_tokens is not None:
        rows.append(("cost", f"{one.cost_per_billion_tokens:,.0f} per billion tokens, paid off in three years"))
    rows.append(("bottleneck", _BOTTLENECKS.get(one.bottleneck or "", one.bottleneck or "")))
    best = worth_buying(one)
    if one.upgrades:
        rows.append(("worth buying", "nothing of it" if best is None else f"{best['name']}: {best['gain'] - 1:+.0%}"))
    return rows


def print_comparison(console: Console, estimates: Sequence[Estimate]) -> None:
    """One row for each strategy."""
    from rich.markup import escape
    from rich.table import Table

    first = estimates[0]
    console.print(f"[bold]{escape(first.model)}[/] on [bold]{escape(first.machine)}[/]", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("strategy", "sequences", "s per step", "tokens/s", "TFLOPS 6N", "bottleneck", ""):
        text = heading in ("strategy", "bottleneck", "")
        table.add_column(heading, justify="left" if text else "right", no_wrap=bool(heading), overflow="fold")
    for one in estimates:
        remark = "simulated only" if one.simulated_only else ""
        if not one.fits:
            table.add_row(one.strategy, "", "", "", "", "", escape(f"does not fit: {one.reason.splitlines()[0]}"))
            continue
        table.add_row(
            one.strategy, str(one.batch_size), f"{one.seconds_per_step:.4g}", f"{one.tokens_per_second:.4g}",
            f"{one.tflops_6n:.4g}", one.bottleneck, remark,
        )  # fmt: skip
    console.print(table, highlight=False)


def _hours(hours: float | None) -> str:
    if hours is None:
        return "?"
    return f"{hours:.3g} hours" if hours < 72 else f"{hours / 24:.3g} days"
