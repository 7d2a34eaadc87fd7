"""What an operation costs besides its work: a task that does nothing, passed from lane to lane."""

from __future__ import annotations

import statistics

from lohan.engine.lanes import Lanes, Task
from lohan.measure.timing import durations

_CHAIN = 200


def measure_op_seconds(seconds: float = 0.3) -> float:
    """Host seconds per scheduled operation, each waiting for one of another lane."""
    lanes = Lanes(("one", "other"), on_failure=lambda error: None)
    try:
        return statistics.median(durations(lambda: _pass_along(lanes), seconds)) / _CHAIN
    finally:
        lanes.close()


def _pass_along(lanes: Lanes) -> None:
    tasks: list[Task] = []
    for number in range(_CHAIN):
        tasks.append(Task(number, ("one", "other")[number % 2], "nothing", tasks[-1:], lambda: None))
    lanes.put(tasks)
    tasks[-1].wait()
