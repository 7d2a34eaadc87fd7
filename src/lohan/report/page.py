"""One self-contained HTML page about a run: words and tables are written here, charts are drawn by charts.js.

Everything that comes from the run is escaped on its way into the page: text by html.escape, numbers for the charts as
JSON in which no "<" is left. The page forbids itself every connection by its Content-Security-Policy.
"""

from __future__ import annotations

import html
import json
import re
import time
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError
from lohan.report import figures, words
from lohan.report.gather import Gathered, gather

NAME = "report.html"


def write_report(place: Path, out: Path | None = None) -> Path:
    """The page about the run that `place` names, as `out` or as report.html in the run's output_dir."""
    run = gather(place)
    target = out or run.output / NAME
    if target.is_dir():
        target = target / NAME
    new = target.with_name(f".{target.name}.new")
    try:
        new.write_text(report_page(run), encoding="utf-8")
        new.replace(target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Name another file with --out.") from None
    return target


def report_page(run: Gathered, *, now: float | None = None) -> str:
    """HTML, whole."""
    charts = {
        **figures.curves(run),
        "timeline": figures.timeline(run),
        "lanes": figures.lane_seconds(run),
        "tiers": figures.tiers(run),
        "activations": figures.activation_curve(run),
    }
    sentence, tried = words.advice(run)
    name = run.config.run_name or run.output.resolve().name
    parts = {
        "TITLE": _text(f"{name}: LoHan report"),
        "NAME": _text(name),
        "STATE": _text(words.state(run, time.time() if now is None else now)),
        "ABOUT": _text(words.about(run)),
        "CARDS": "".join(_card(*card) for card in words.cards(run)),
        "BOTTLENECK": "".join(f"<p>{_code(said)}</p>" for said in words.bottleneck(run)),
        "ADVICE": f"<p>{_code(sentence)}</p>{_upgrades(tried)}",
        "PLAN": _table(words.plan_rows(run)) or f"<p>{_code(figures.NO_PLAN)}</p>",
        "CONFIG": _table([(one.name, _shown(getattr(run.config, one.name))) for one in fields(run.config)], code=True),
        "VERSIONS": _table(list(((run.plan or {}).get("versions") or {}).items()), code=True)
        or f"<p>{_code(figures.NO_PLAN)}</p>",
        "DATA": json.dumps(
            {name: chart for name, chart in charts.items() if not isinstance(chart, str)}, separators=(",", ":")
        ).replace("<", "\\u003c"),
        "STYLE": _resource("page.css"),
        "SCRIPT": _resource("charts.js"),
    }
    for chart, found in charts.items():
        parts[f"CHART_{chart.upper()}"] = (
            f'<p class="missing">{_code(found)}</p>' if isinstance(found, str) else f'<div data-chart="{chart}"></div>'
        )
    # In one pass: what a run calls itself may look like a placeholder.
    return re.sub(r"@([A-Z_]+)@", lambda match: parts[match[1]], _resource("page.html"))


def _resource(name: str) -> str:
    return (resources.files("lohan.report") / name).read_text(encoding="utf-8")


def _text(value: Any) -> str:
    return html.escape(str(value))


def _code(value: str) -> str:
    """Our own sentences: what stands in backquotes can be typed."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(value))


def _card(name: str, figure: str, remark: str) -> str:
    return f"<div class=card><dt>{_text(name)}</dt><dd><b>{_text(figure)}</b><span>{_text(remark)}</span></dd></div>"


def _table(rows: list[tuple[str, str]], *, code: bool = False) -> str:
    if not rows:
        return ""
    kind = ' class="code"' if code else ""
    body = "".join(f"<tr><th scope=row>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    return f"<table{kind}>{body}</table>"


def _upgrades(tried: list[dict[str, Any]]) -> str:
    if not tried:
        return ""
    rows = []
    for one in tried:
        rate, gain = one["tokens_per_second"], one["gain"]
        told = ("does not fit", "") if rate is None else (f"{rate:,.0f}", f"{gain - 1:+.0%}")
        rows.append(f"<tr><th scope=row>{_text(one['name'])}</th><td>{told[0]}</td><td>{told[1]}</td></tr>")
    head = "<tr><td></td><th scope=col>tokens/s</th><th scope=col>gain</th></tr>"
    return f'<table class="figures"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) if value else "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
