"""Traces: real spans of every lane and drive, in a form that Perfetto reads, with nothing drawn over anything else."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import lohan
from lohan.engine.trace import Span, Step, Trace, to_chrome
from lohan.plan.schedule import LANES
from lohan.testing.zoo import random_batches, tiny_model_folder


def checked(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """A trace's events by the name of their track, after everything a viewer relies on was checked."""
    json.dumps(trace, allow_nan=False)
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(processes.values()) == {"lanes", "drives"}
    assert len(set(threads.values())) == len(threads)
    tracks: dict[str, list[dict[str, Any]]] = {name: [] for name in threads.values()}
    for event in events:
        assert event["ph"] in ("M", "X")
        if event["ph"] == "X":
            assert {"name", "cat", "pid", "tid", "ts", "dur"} <= event.keys()
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            tracks[threads[event["pid"], event["tid"]]].append(event)
    for spans in tracks.values():
        spans.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(spans):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    return tracks


def train(tmp_path: Path, device: str, steps: int, **options: Any) -> list[tuple[float, float]]:
    times = []
    with lohan.open_run(
        model=tiny_model_folder("llama", tmp_path / "source"), ssd=[tmp_path / "a", tmp_path / "b"], weights=[1, 1],
        host_memory="200MB", gpu_memory=None if device == "cpu" else "200MB", device=device,
        keep_nothing_in_memory=True, trace=tmp_path / "trace", **options,
    ) as run:  # fmt: skip
        for step in range(steps):
            result = run.step(random_batches(257, num_micro_batches=2, batch=1, seq=12, seed=1, step=step))
            times.append((result.step, result.seconds))
        run.write_trace(tmp_path / "all.json", steps=steps)
    return times


@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_every_step_writes_what_its_lanes_and_drives_did(device: str, tmp_path: Path) -> None:
    times = train(tmp_path, device, 3)
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [f"step-00000{n}.json" for n in (1, 2, 3)]
    tracks = checked(json.loads((tmp_path / "trace" / "step-000002.json").read_text()))
    assert set(LANES) <= tracks.keys()
    kinds = defaultdict(set)
    for name, spans in tracks.items():
        kinds[name.split(" (")[0]] |= {span["cat"] for span in spans}
    assert kinds["gpu"] == {"forward", "backward"}
    assert "update" in kinds["cpu_update"]
    assert {"read_weights", "read_state"} <= kinds["ssd_read"]
    assert "write" in kinds["ssd_write"]
    assert ("to_gpu" in kinds["to_gpu"]) == (device == "virtual")
    assert "act_out" in kinds["to_host"]
    for drive in (1, 2):
        assert kinds[f"drive {drive} read"] == {"read"}
        assert kinds[f"drive {drive} write"] == {"write"}
    [step] = tracks["step"]
    assert step["name"] == "step 2"
    assert step["dur"] == pytest.approx(times[1][1] * 1e6, rel=1e-3)
    forwards = [span for span in tracks["gpu"] if span["cat"] == "forward"]
    names = [span["name"] for span in forwards]
    assert list(dict.fromkeys(names)) == [f"forward {unit}" for unit in range(6)]  # each for all micro-batches
    assert len({names.count(name) for name in names}) == 1
    everything = checked(json.loads((tmp_path / "all.json").read_text()))
    assert [span["name"] for span in everything["step"]] == ["step 1", "step 2", "step 3"]


def test_only_the_last_files_are_kept(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace", keep=2)
    for number in range(1, 6):
        trace.begin_step(float(number))
        trace.spans.append(("gpu", f"forward {number}", number, number + 0.5))
        trace.end_step(number, float(number), number + 0.9)
    trace.close(6.0)
    trace.close(6.0)
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["step-000004.json", "step-000005.json"]
    tracks = checked(json.loads((tmp_path / "trace" / "step-000005.json").read_text()))
    assert [span["name"] for span in tracks["gpu"]] == ["forward 5"]


def test_a_lane_that_does_several_things_at_once_has_several_tracks() -> None:
    spans = [Span("ssd_read", "a 1", 0, 3), Span("ssd_read", "b 1", 1, 2), Span("ssd_read", "c 1", 2, 4)]
    tracks = checked(to_chrome(spans, [Step(1, 0.0, 4.0)]))
    assert [span["name"] for span in tracks["ssd_read"]] == ["a 1"]
    assert [span["name"] for span in tracks["ssd_read (2)"]] == ["b 1", "c 1"]


def test_an_idle_lane_is_seen_to_be_idle() -> None:
    tracks = checked(to_chrome([]))
    assert set(LANES) <= tracks.keys()
    assert not any(tracks.values())
