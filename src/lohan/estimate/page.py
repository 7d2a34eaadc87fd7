"""One self-contained page that draws a simulated step: lanes down, time across. No network, light and dark.

The spans of the last step are in the page as numbers and drawn on a canvas; the wheel zooms, dragging moves, pointing
names an operation.
"""

from __future__ import annotations

import html
import json
from importlib import resources

from lohan.estimate.estimate import Estimate
from lohan.plan.schedule import LANES
from lohan.sim.timeline import Timeline

_KINDS = ("forward", "backward", "read_weights", "read_state", "read_gradient", "to_gpu", "act_out", "act_write",
          "act_read", "act_in", "gradient", "norm", "clip", "update", "write", "spill")  # fmt: skip
_OF_MICRO_BATCH = ("forward", "backward", "act_out", "act_in", "act_write", "act_read")


def lanes_page(estimate: Estimate, timeline: Timeline) -> str:
    """HTML, whole."""
    first, last = timeline.window
    names: dict[str, int] = {}
    spans: list[list[float]] = []
    for op, service, end in zip(timeline.ops, timeline.service, timeline.end, strict=True):
        if op.lane in LANES and end > first and service < last and end > service:
            key = op.key
            label = key.kind + (f" of unit {key.unit}" if key.unit >= 0 else "")
            label += (
                f", {'micro-batch' if key.kind in _OF_MICRO_BATCH else 'piece'} {key.piece}" if key.piece >= 0 else ""
            )
            kind = _KINDS.index(key.kind) if key.kind in _KINDS else len(_KINDS)
            number = names.setdefault(label, len(names))
            spans.append([LANES.index(op.lane), kind, round(service - first, 9), round(end - first, 9), number])
    used = sorted({int(span[0]) for span in spans})
    data = {
        "seconds": last - first,
        "lanes": [LANES[lane] for lane in used],
        "kinds": [*_KINDS, "other"],
        "names": list(names),
        "spans": [[used.index(int(lane)), *rest] for lane, *rest in spans],
        "busy": [timeline.busy_seconds()[LANES[lane]] for lane in used],
    }
    title = f"{estimate.model} on {estimate.machine}, {estimate.strategy}"
    what = (
        f"{timeline.seconds_per_step:.4g} s per step of {estimate.tokens_per_step:,} tokens, "
        f"{(estimate.tokens_per_step or 0) / timeline.seconds_per_step:.4g} tokens/s; bottleneck {timeline.bottleneck}"
        f"{'; simulated only' if estimate.simulated_only else ''}. The last of {len(timeline.step_ends)} steps."
    )
    # "</" would end the script; JSON may write it as "<\\/".
    numbers = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    page = (resources.files("lohan.estimate") / "lanes.html").read_text()
    return page.replace("@TITLE@", html.escape(title)).replace("@WHAT@", html.escape(what)).replace("@DATA@", numbers)
