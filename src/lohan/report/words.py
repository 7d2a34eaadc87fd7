"""What a report says in words: how the run stands, its main figures, its bottleneck, and what would help. Pure."""

from __future__ import annotations

from datetime import datetime
from pathlib import PurePath
from typing import Any

from lohan.report.figures import (
    BUSY,
    measured_busy,
    median_of,
    predicted_step,
    recent,
    wear,
    why_no_prediction,
)
from lohan.report.gather import Gathered, number
from lohan.sizes import format_bytes

WORTH_IT = 1.03
"""What is said to help gives at least this; as estimate/estimate.py."""

OFF = 0.1
"""A prediction further off than this is remarked upon: the project's own limit."""

_LIMITS = {
    "gpu": "computing",
    "cpu_update": "updating on the CPU",
    "ssd": "the drives",
    "to_gpu": "the link to the device",
    "to_host": "the link from the device",
}


def state(run: Gathered, now: float) -> str:
    """One sentence."""
    found = run.status
    of = "" if found.total_steps is None else f" of {found.total_steps:,}"
    when = datetime.fromtimestamp(now).strftime("%d %B %Y, %H:%M").lstrip("0")
    words = {
        "running": f"Still training: step {found.step:,}{of} when this page was made, {when}. Make it again for more.",
        "finished": f"Finished: {found.step:,}{of} steps.",
        "early": f"Stopped early after step {found.step:,}{of}: evaluations got no better.",
        "interrupted": f"Stopped by hand after step {found.step:,}{of}; the same command goes on.",
        "died": f"Not running and not finished: step {found.step:,}{of}. The same command goes on.",
    }
    return words.get(found.state, f"Step {found.step:,}{of}.")


def about(run: Gathered) -> str:
    """What was trained on what, and where its files are."""
    data = ", ".join(PurePath(file).name for file in run.config.train_file)
    return f"{PurePath(run.config.model_name_or_path).name} on {data}, in {run.output}"


def cards(run: Gathered) -> list[tuple[str, str, str]]:
    """(name, figure, remark) of what people look for first."""
    made = []
    losses = [value for line in run.steps if (value := number(line.get("loss"))) is not None]
    if losses:
        held = [line["eval_loss"] for line in run.evaluations]
        remark = f"from {losses[0]:.4g}" + (f"; held out {held[0]:.4g} → {held[-1]:.4g}" if len(held) > 1 else "")
        if len(held) == 1:
            remark += f"; held out {held[0]:.4g}"
        made.append(("Loss", f"{losses[-1]:.4g}", remark))
    lines = recent(run)
    rate, seconds = median_of(lines, "tokens_per_second"), median_of(lines, "seconds")
    if rate is not None:
        tokens = sum(number(line.get("tokens")) or 0 for line in run.steps)
        made.append(("Speed", f"{rate:,.0f} tokens/s", f"median; {tokens:,.0f} tokens in all"))
    foretold = predicted_step(run)
    if seconds is not None:
        remark = "median; nothing was predicted"
        if foretold is not None:
            remark = f"median; predicted {foretold['seconds']:.3g} s ({off(seconds, foretold['seconds'])})"
        made.append(("Step", f"{seconds:.3g} s", remark))
    if run.plan is not None:
        peak = max((v for line in run.steps if (v := number(line.get("rss_bytes"))) is not None), default=None)
        base = number(run.plan.get("base_rss_bytes"))
        if peak is not None and base is not None:
            budget = format_bytes(run.plan["preview"]["host_bytes"])
            made.append(("RAM", format_bytes(max(0.0, peak - base)), f"most after a step, of {budget} allowed"))
    written, share, of = wear(run)
    if written is not None:
        made.append(("SSD written", format_bytes(written), f"{percent(share)} of {of}"))
    return made


def off(measured: float, foretold: float) -> str:
    """How far measured is from predicted."""
    gap = measured / foretold - 1
    if gap > 1:
        return f"measured {gap + 1:.1f} times as long"
    return f"measured {abs(gap):.0%} {'longer' if gap >= 0 else 'shorter'}" if abs(gap) >= 0.005 else "as predicted"


def percent(share: float) -> str:
    return f"{share:.2%}" if share >= 0.0001 else "less than 0.01%"


def bottleneck(run: Gathered) -> list[str]:
    """Where the time goes, predicted and measured."""
    said = []
    foretold = predicted_step(run)
    if foretold is None:
        said.append(why_no_prediction(run))
    else:
        lane, seconds = foretold["bottleneck"], foretold["seconds"]
        share = foretold["busy"].get(lane, 0.0) / seconds
        said.append(f"Predicted: {_LIMITS.get(lane, lane)} is the limit, at work {share:.0%} of a step.")
    busy = {lane: s for lane, s in measured_busy(run).items() if not lane.startswith("drives ")}
    if busy and run.step is not None:
        lane = max(busy, key=lambda name: busy[name])
        share = busy[lane] / run.step["seconds"]
        said.append(f"Measured in step {run.step['step']:,}: {BUSY[lane]} took most, {share:.0%} of it.")
    seconds = median_of(recent(run), "seconds")
    if foretold is not None and seconds is not None and abs(seconds / foretold["seconds"] - 1) > OFF:
        said.append(
            f"The median step took {seconds:.3g} s and {foretold['seconds']:.3g} s were predicted, more than "
            f"{OFF:.0%} apart: the machine was busier or idler than when it was profiled, or the profile is of "
            "another one. Compare the lanes below, and measure it again with `lohan profile` while nothing else runs."
        )
    return said


def advice(run: Gathered) -> tuple[str, list[dict[str, Any]]]:
    """A sentence, and every upgrade that was tried, the best first."""
    if run.plan is None or not run.plan.get("predicted"):
        return why_no_prediction(run), []
    tried = list(run.plan["predicted"].get("upgrades") or [])
    if not tried:
        return "Planning this run again with more of anything took too long to be done before it began.", []
    tried.sort(key=lambda one: -(one["gain"] or 0.0))
    best = tried[0]
    if not best["gain"] or best["gain"] < WORTH_IT:
        return f"None of these gives more than {WORTH_IT - 1:.0%}: this run gets what the machine has.", tried
    return f"Planned again, {best['name']} gives most: {best['gain'] - 1:+.0%} tokens per second.", tried


def plan_rows(run: Gathered) -> list[tuple[str, str]]:
    """The plan's decisions."""
    if run.plan is None:
        return []
    plan, ahead = run.plan["plan"], run.plan["preview"]
    kept = [tier for unit in plan["kept"] for _, tier in unit]
    names = {"device": "on the device", "host": "in RAM", "ssd": "on SSD"}
    where = ", ".join(f"{kept.count(tier)} {name}" for tier, name in names.items() if tier in kept)
    resident = f"weights of {len(plan['resident_weights'])}, states of {len(plan['resident_state'])}"
    clip = {
        "immediate": "not asked for",
        "deferred": "updates wait for the norm, and run in the next forward",
        "speculative": "updates run at once, and again where the norm asks for it",
    }
    clipping = clip.get(plan["clip"], plan["clip"])
    later = (run.step or {}).get("clip")
    if later in clip and later != plan["clip"]:
        clipping += f"; since many steps clip: {clip[later]}"
    return [
        ("model", f"{ahead['num_parameters'] / 1e6:,.1f} million parameters in {ahead['num_units']} parts"),
        ("step", f"{run.plan['micro_batches']} micro-batches, up to {ahead['tokens_per_step']:,} tokens"),
        ("stay in RAM", f"{resident} of {ahead['num_units']} parts"),
        ("activations", f"{len(kept)} operators' outputs kept ({where})" if kept else "computed again inside blocks"),
        ("clipping", clipping),
        ("gradients", "on SSD until they are used" if plan["gradients_on_ssd"] else "in RAM until they are used"),
        ("loss", f"in {plan['head_chunks']} chunks" if plan["head_chunks"] > 1 else "in one piece"),
    ]
