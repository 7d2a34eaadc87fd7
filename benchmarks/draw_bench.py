"""The page and the plots of a results file: python benchmarks/draw_bench.py bench.json OUT.md (plots need matplotlib)

Writes OUT.md with what was measured, on what, and every option that was changed for a peer, and beside it
OUT_speed.png (tokens/s at every point), OUT_memory.png and OUT_growth.png (step seconds against parameters and tokens).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from peers import checking
from peers.findings import (
    FOLDER_HEADINGS,
    HEADINGS,
    Findings,
    folder_rows,
    json_rows,
    limit_line,
    limits_at,
    markdown_table,
    point_rows,
    read_findings,
)
from peers.systems import SYSTEMS, changes_table, describe
from peers.workloads import SHAPES, num_parameters

COLOURS = {
    "pytorch": "#9AA5B1", "fsdp2-cpu": "#C9CFD6", "deepspeed-cpu": "#C2803B", "deepspeed-nvme": "#B23A48",
    "lohan": "#1F3D63", "lohan-fp32": "#3E6FA3", "lohan-paper": "#7FA3C7", "separate-stage": "#B5CBE0",
}  # fmt: skip


def page(findings: Findings, plots: dict[str, Path]) -> str:
    machine = findings.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    parts = [
        f"# Side by side with what people use today, {machine.get('started', '')}",
        "    make bench",
        f"Machine: {machine.get('cores')} cores, {machine.get('memory_bytes', 0) / 2**30:.0f} GiB, "
        f"{machine.get('system')}. {versions}. Everybody trains the same model on the same data in fp32 with two "
        "threads; weights and gradients of ours travel in bf16 (`lohan-fp32`: in fp32, as the peers'). No clipping, no "
        "checkpoints. Medians of counted steps; spread is from the fastest to the slowest. *Over limit* is the step "
        "over the busiest resource's own time, measured alone in the same rounds, for the bytes that system moves.",
        describe(),
        *(f"![{name}]({path.name})" for name, path in plots.items()),
    ]
    for point in findings.points:
        shape, tokens = point
        parts += [
            f"## {shape} ({num_parameters(shape):,} parameters), {tokens} tokens per step",
            markdown_table(HEADINGS, point_rows(findings, point)),
            limit_line(findings, point),
        ]
        if folders := folder_rows(findings, point):
            parts.append(markdown_table(FOLDER_HEADINGS, folders))
    parts += ["## Growth", _growth(findings)]
    if findings.checks:
        lines = [f"    {checking.sentence(name, check)}" for name, check in findings.checks.items()]
        steps = f"Losses and weights after {checking.STEPS} steps at 60M beside plain PyTorch's:"
        parts += ["## Do they train on the right numbers?", steps, "\n".join(lines)]
    parts += ["## What was changed to make them run, and tuned", changes_table()]
    rows = "\n".join(f"    {row}" for row in json_rows(findings))
    return "\n\n".join([*parts, "## As data", rows]) + "\n"


def _growth(findings: Findings) -> str:
    """Step seconds and peak RSS of every system along one axis while the other stays."""
    tables = []
    for tokens in sorted({tokens for _, tokens in findings.points}):
        shapes = [shape for shape in SHAPES if (shape, tokens) in findings.points]
        if len(shapes) > 1:
            tables.append(_axis(findings, f"{tokens} tokens", [(shape, tokens) for shape in shapes], shapes))
    for shape in SHAPES:
        counts = sorted(tokens for one, tokens in findings.points if one == shape)
        if len(counts) > 1:
            names = [f"{count} tokens" for count in counts]
            tables.append(_axis(findings, shape, [(shape, count) for count in counts], names))
    return "\n\n".join(tables) or "One point was measured."


def _axis(findings: Findings, title: str, points: list[tuple[str, int]], names: list[str]) -> str:
    rows = []
    for system in SYSTEMS:
        found = [findings.find(*point, system) for point in points]
        if any(found):
            rows.append(
                [system, *("" if one is None else f"{one.seconds:.2f} s, {one.peak_rss / 1e9:.2f} GB" for one in found)]
            )
    return markdown_table([title, *names], rows)


# -- plots --------------------------------------------------------------------------------------------


def _bars(pyplot: Any, findings: Findings, out: Path, title: str, value: Any, limit: bool) -> None:
    points = findings.points
    columns = min(3, len(points))
    rows = -(-len(points) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.4 * columns, 0.7 + 2.6 * rows), squeeze=False, constrained_layout=True
    )
    for axis in axes.flat[len(points) :]:
        axis.axis("off")
    for axis, point in zip(axes.flat, points, strict=False):
        found = [one for name in SYSTEMS if (one := findings.find(*point, name)) is not None]
        values = [value(one) for one in found]
        places = range(len(found))[::-1]
        axis.barh(places, values, color=[COLOURS[one.system] for one in found])
        for place, number in zip(places, values, strict=True):
            axis.text(number, place, f" {number:,.0f}" if number >= 100 else f" {number:.3g}", va="center", fontsize=8)
        limits = limits_at(findings, point)
        if limit and limits is not None and (ours := findings.find(*point, "lohan")) is not None:
            best = point[1] / limits.seconds(SYSTEMS["lohan"], ours.ssd_bytes)
            axis.axvline(best, color=COLOURS["lohan"], linestyle=":", linewidth=1.2)
            axis.text(best, len(found) - 0.45, "lohan's limit", fontsize=7, ha="center", color=COLOURS["lohan"])
        axis.set_yticks(list(places), [one.system for one in found], fontsize=8)
        axis.set_xlim(right=1.2 * max(values))
        axis.set_title(f"{point[0]}, {point[1]} tokens", fontsize=10, pad=12)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.supxlabel(title, fontsize=10)
    figure.savefig(out, dpi=110)


def _lines(pyplot: Any, findings: Findings, out: Path) -> None:
    """Step seconds against parameters, and against tokens, where more than one was measured."""
    token_counts = sorted({tokens for _, tokens in findings.points})
    shapes = [shape for shape in SHAPES if any(shape == one for one, _ in findings.points)]
    panels: list[tuple[str, str, list[tuple[str, int]], list[float]]] = []
    if len(shapes) > 1:
        for tokens in token_counts:
            points = [(shape, tokens) for shape in shapes]
            panels.append((f"{tokens} tokens per step", "parameters", points, [num_parameters(s) for s in shapes]))
    if len(token_counts) > 1:
        for shape in shapes:
            points = [(shape, tokens) for tokens in token_counts]
            panels.append((f"{shape} parameters", "tokens per step", points, [float(t) for t in token_counts]))
    panels = [panel for panel in panels if len(set(panel[2]) & set(findings.points)) > 1]
    if not panels:
        return
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.4 * columns, 3.4 * rows), squeeze=False, constrained_layout=True
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (title, label, points, places) in zip(axes.flat, panels, strict=False):
        for system in SYSTEMS:
            found = [
                (place, one)
                for place, point in zip(places, points, strict=True)
                if (one := findings.find(*point, system))
            ]
            if found:
                seconds = [one.seconds for _, one in found]
                axis.loglog(
                    [place for place, _ in found], seconds, "o-", color=COLOURS[system], label=system, markersize=4
                )
        axis.set_title(title, fontsize=10)
        axis.set_xticks(places, [point[0] if label == "parameters" else f"{point[1]:,}" for point in points])
        axis.xaxis.set_minor_formatter("")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="both", labelsize=8)
        axis.set_xlabel(label)
        axis.set_ylabel("seconds per step")
        axis.grid(alpha=0.25)
    # Not every system has a line in the first panel.
    named = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    shown = [system for system in SYSTEMS if system in named]
    axes.flat[0].legend([named[system] for system in shown], shown, frameon=False, fontsize=7)
    figure.savefig(out, dpi=110)


def draw(findings: Findings, out: Path) -> dict[str, Path]:
    try:
        import matplotlib
    except ImportError:
        print("No plots: they need matplotlib. Install it: pip install -e '.[pictures]'", file=sys.stderr)
        return {}
    matplotlib.use("Agg")
    from matplotlib import pyplot

    base = out.with_suffix("")
    plots = {
        "Tokens per second": base.with_name(f"{base.name}_speed.png"),
        "Peak RSS": base.with_name(f"{base.name}_memory.png"),
        "Growth": base.with_name(f"{base.name}_growth.png"),
    }
    _bars(pyplot, findings, plots["Tokens per second"], "tokens per second", lambda one: one.tokens_per_second, True)
    _bars(pyplot, findings, plots["Peak RSS"], "peak RSS while training, GB", lambda one: one.peak_rss / 1e9, False)
    _lines(pyplot, findings, plots["Growth"])
    return {name: path for name, path in plots.items() if path.exists()}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python benchmarks/draw_bench.py bench.json OUT.md")
    findings, out = read_findings(Path(sys.argv[1])), Path(sys.argv[2])
    out.write_text(page(findings, draw(findings, out)))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
