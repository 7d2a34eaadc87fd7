"""What a person sees while a run trains: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections import deque
from types import TracebackType
from typing import Any, Protocol

from lohan.sizes import format_bytes

_RECENT = 20
"""Steps the expected end is judged by."""


class Display(Protocol):
    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """A sentence that stays."""

    def show(self, record: dict[str, Any]) -> None:
        """A step, as it stands in metrics.jsonl."""


def make_display(total_steps: int, *, every: int, live: bool | None = None) -> Display:
    """The display for this place; `live` decides where None would look for a terminal."""
    wanted = sys.stdout.isatty() if live is None else live
    return LiveDisplay(total_steps) if wanted else PlainDisplay(total_steps, every=every)


class _Pace:
    """How long it will still take."""

    def __init__(self, total_steps: int):
        self._total = total_steps
        self._seconds: deque[float] = deque(maxlen=_RECENT)

    def left(self, record: dict[str, Any]) -> str:
        self._seconds.append(record["seconds"])
        mean = sum(self._seconds) / len(self._seconds)
        return clock(mean * (self._total - record["step"]))


class PlainDisplay:
    """A line every so many steps, and for the last one."""

    def __init__(self, total_steps: int, *, every: int):
        self._total, self._every = total_steps, every
        self._pace = _Pace(total_steps)

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, record: dict[str, Any]) -> None:
        left = self._pace.left(record)
        if record["step"] % self._every == 0 or record["step"] == self._total:
            print(f"step {record['step']}/{self._total}  {facts(record)}  {left} left", flush=True)


class LiveDisplay:
    """A bar and the last step's numbers, drawn in place."""

    def __init__(self, total_steps: int, console: Any = None):
        from rich.console import Console
        from rich.live import Live

        self._total, self._pace = total_steps, _Pace(total_steps)
        self._live = Live(console=console or Console(), refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        from rich.markup import escape

        self._live.console.print(escape(text), highlight=False, soft_wrap=True)

    def show(self, record: dict[str, Any]) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_row(
            f"[bold]step {record['step']}[/]/{self._total}",
            ProgressBar(self._total, record["step"], width=30),
            f"{self._pace.left(record)} left",
        )
        lanes = Table.grid(padding=(0, 2))
        for name, seconds in record["busy_seconds"].items():
            share = min(seconds / max(record["seconds"], 1e-9), 1.0)
            lanes.add_row(name, ProgressBar(1.0, share, width=20), f"{share:.0%}")
        memory = f"{format_bytes(record['rss_bytes'])} RAM, {format_bytes(record['ssd_bytes'])} of SSD traffic"
        self._live.update(Group(table, facts(record), lanes, memory))


def facts(record: dict[str, Any]) -> str:
    """A step in one line."""
    norm = "skipped" if record["grad_norm"] is None else f"norm {record['grad_norm']:.3g}"
    return (
        f"epoch {record['epoch']:.2f}  loss {record['loss']:.4f}  {norm}  lr {record['learning_rate']:.2e}  "
        f"{record['tokens_per_second']:,.0f} tokens/s  {record['seconds']:.2f} s"
    )


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
