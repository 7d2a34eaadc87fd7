"""What a person sees while a run trains: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections import deque
from types import TracebackType
from typing import Any, Protocol

from lohan.sizes import format_bytes

_RECENT = 20
"""Steps the expected end is judged by."""

_LANES = {
    "gpu": "computing", "cpu_update": "updating", "drives read": "SSD read", "drives write": "SSD write",
    "to_gpu": "to device", "to_host": "to host",
}  # fmt: skip
"""Lanes that have a bar, two in a row, as report/spans.py names them."""


class Display(Protocol):
    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """A sentence that stays."""

    def show(self, record: dict[str, Any]) -> None:
        """A step, as it stands in metrics.jsonl, with `run_bytes` of `host_bytes`, `total_written_bytes`, `wear`, and
        `lanes` if `shows_lanes`."""

    def stopping(self) -> None:
        """The run will stop after this step. Called in a signal handler."""

    @property
    def shows_lanes(self) -> bool: ...


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


_STOPPING = "Stopping after this step. Once more stops at once; both can be gone on from."


class PlainDisplay:
    """A line every so many steps, and for the last one."""

    shows_lanes = False

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

    def stopping(self) -> None:
        # Not print(): the main thread may be inside one, and Python refuses to enter it twice.
        os.write(2, f"\n{_STOPPING}\n".encode())


class LiveDisplay:
    """A bar, the last step's numbers, what every lane did of it, and what memory and drives bear, drawn in place."""

    shows_lanes = True

    def __init__(self, total_steps: int, console: Any = None):
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._total, self._pace = total_steps, _Pace(total_steps)
        self._last: Any = Text("The first step is under way.")
        self._stopping = False
        self._live = Live(console=console or Console(), refresh_per_second=4, get_renderable=self._drawn)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = False
        self._live.stop()

    def stopping(self) -> None:
        self._stopping = True  # drawn with the next picture: what is written beside the panel would be drawn over

    def _drawn(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(self._last, Text(_STOPPING, style="bold")) if self._stopping else self._last

    def say(self, text: str) -> None:
        from rich.markup import escape

        self._live.console.print(escape(text), highlight=False, soft_wrap=True)

    def show(self, record: dict[str, Any]) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_row(
            f"[bold]step {record['step']}[/]/{self._total}",
            ProgressBar(self._total, record["step"], width=30),
            f"{record['step'] / self._total:.0%}",
            f"{self._pace.left(record)} left",
        )
        lanes = Table.grid(padding=(0, 2))
        busy = [(words, record["lanes"][name]) for name, words in _LANES.items() if name in record["lanes"]]
        for first in range(0, len(busy), 2):
            cells: list[Any] = []
            for words, seconds in busy[first : first + 2]:
                share = min(seconds / max(record["seconds"], 1e-9), 1.0)
                cells += [words, ProgressBar(1.0, share, width=18), Text(f"{share:>4.0%}")]
            lanes.add_row(*cells)
        self._last = Group(table, Text(facts(record)), lanes, Text(_burden(record)))
        self._live.refresh()


def _burden(record: dict[str, Any]) -> str:
    """What memory and drives bear; each line fits into 80 columns."""
    lines = [
        f"RAM {format_bytes(record['run_bytes'])} of {format_bytes(record['host_bytes'])}, "
        f"{format_bytes(record['rss_bytes'])} with Python and its libraries"
    ]
    if record.get("device_bytes") is not None:
        lines.append(f"device memory {format_bytes(record['device_bytes'])} at its peak")
    wear = f"{record['wear']:.2%}" if record["wear"] >= 0.0001 else "under 0.01%"
    lines.append(
        f"SSD {format_bytes(record['ssd_bytes'])} in this step, {format_bytes(record['total_written_bytes'])} written "
        f"so far ({wear} of its life)"
    )
    return "\n".join(lines)


def in_a_line(text: str) -> str:
    """Line breaks shown and not obeyed."""
    return text.replace("\n", "\\n")


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
