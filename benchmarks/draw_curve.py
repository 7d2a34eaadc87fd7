"""Draw what activation_curve.py --save wrote: python benchmarks/draw_curve.py FILE.json OUT.png (needs matplotlib)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main() -> None:
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    results = json.loads(source.read_text())
    figure, axes = pyplot.subplots(1, len(results), figsize=(4.2 * len(results), 3.7), constrained_layout=True)
    for axis, (tokens, one) in zip(axes, results.items(), strict=True):
        sent = [point[0] / 1e6 for point in one["points"]]
        axis.plot(sent, [point[1] for point in one["points"]], "o-", color="#1F3D63", label="measured")
        axis.plot(sent, [point[2] for point in one["points"]], "--", color="#C2803B", label="predicted")
        axis.plot(one["choice"][0] / 1e6, one["choice"][1], "*", markersize=16, color="#B23A48", label="chosen")
        axis.set_title(f"{tokens} tokens per step", fontsize=11)
        axis.set_xlabel("activations sent off the device, MB")
        axis.set_ylim(bottom=0, top=1.15 * max(point[1] for point in one["points"]))
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylabel("seconds per step")
    axes[0].legend(frameon=False, loc="lower right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
