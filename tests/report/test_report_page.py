"""The page in a real browser: every chart is drawn, its console is clean, and it asks nobody for anything."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from chromium import INSTALL, Browser, find_chromium

from lohan.report.gather import gather
from lohan.report.page import report_page, write_report

CHARTS = {"loss", "rate", "norm", "learning_rate", "timeline", "lanes", "tiers", "activations"}
MARKS = """Object.fromEntries([...document.querySelectorAll("[data-chart]")].map(host => [host.dataset.chart,
    [...host.querySelectorAll("svg .mark")].filter(mark => {
        const box = mark.getBBox();
        return box.width + box.height > 0 && [box.x, box.y, box.width, box.height].every(Number.isFinite);
    }).length]))"""


@pytest.fixture(scope="module")
def browser():
    program = find_chromium()
    if program is None:
        reason = f"there is no Chromium here; install it with: {INSTALL}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with Browser(program) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _fresh(browser):
    browser.console.clear()
    browser.requests.clear()


def undrawn(browser) -> set[str]:
    """The charts that are missing or have no visible mark."""
    return CHARTS - {name for name, marks in browser.run(MARKS).items() if marks > 0}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 390, 360])
def test_every_chart_is_drawn_the_console_is_clean_and_nothing_is_requested(browser, run, width, dark):
    page = write_report(run)
    browser.open(page, width=width, dark=dark)
    assert undrawn(browser) == set()
    assert browser.console == []
    assert browser.requests == [page.as_uri()]
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(18, 20, 23)" if dark else "rgb(247, 247, 245)"
    )


def test_both_sides_of_the_timeline_and_the_chosen_point_are_drawn(browser, run):
    browser.open(write_report(run))
    for side in ("predicted", "measured"):
        assert browser.run(f"""document.querySelectorAll('[data-chart=timeline] .mark[data-side={side}]').length""") > 3
        assert browser.run(f"""document.querySelectorAll('[data-chart=lanes] .mark[data-side={side}]').length""") > 3
    assert browser.run("document.querySelectorAll('[data-chart=activations] .chosen').length") == 1
    labels = browser.run("[...document.querySelectorAll('svg')].map(svg => svg.getAttribute('aria-label')).join(' ')")
    assert "NaN" not in labels + browser.run("document.body.innerHTML")
    assert "undefined" not in browser.run("document.body.innerText")


@pytest.mark.parametrize("chart", sorted(CHARTS))
def test_a_chart_that_is_not_drawn_is_noticed(browser, run, chart):
    page = run / "report.html"
    page.write_text(report_page(gather(run)).replace(f'<div data-chart="{chart}"></div>', ""))
    browser.open(page)
    assert undrawn(browser) == {chart}


def test_a_script_that_fails_and_a_request_that_is_made_are_noticed(browser, run):
    page = run / "report.html"
    page.write_text(report_page(gather(run)).replace("</main>", "</main><script>nothing()</script><img src=x.png>"))
    browser.open(page)
    assert any("nothing is not defined" in said for said in browser.console)
    # The page's own policy stops the request before it leaves.
    assert any("Content Security Policy" in said for said in browser.console)


def test_values_can_be_read_by_pointer_and_by_keys(browser, run):
    browser.open(write_report(run))
    tip = "document.querySelector('[data-chart=loss] .tip').textContent"
    browser.run("document.querySelector('[data-chart=loss] svg').scrollIntoView({block: 'center'})")
    box = browser.run(
        "(b => [b.x, b.y, b.width, b.height])(document.querySelector('[data-chart=loss] svg').getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] * 0.5, y=box[1] + box[3] * 0.5)
    assert browser.run(tip).startswith("step ")
    browser.run("document.querySelector('[data-chart=loss] svg').focus()")
    for key in ("Home", "ArrowRight"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert browser.run(tip).splitlines()[0] == f"step {first['step']}"


def test_the_timeline_can_be_looked_at_closely(browser, run):
    browser.open(write_report(run))
    ticks = (
        "[...document.querySelectorAll('[data-chart=timeline] svg text[text-anchor=middle]')].map(t => t.textContent)"
    )
    whole = browser.run(ticks)
    browser.run("document.querySelector('[data-chart=timeline] button').click()")
    assert browser.run(ticks) != whole
    browser.run("[...document.querySelectorAll('[data-chart=timeline] button')].pop().click()")
    assert browser.run(ticks) == whole
    assert undrawn(browser) == set()


def test_charts_follow_the_width_of_the_window(browser, run):
    browser.open(write_report(run), width=1400)
    before = browser.run("document.querySelector('[data-chart=timeline] svg').getAttribute('viewBox')")
    browser.size(500, 900)
    browser.settle()
    assert browser.run("document.querySelector('[data-chart=timeline] svg').getAttribute('viewBox')") != before
    assert browser.run("document.documentElement.scrollWidth") <= 500
    assert undrawn(browser) == set()


def test_what_a_run_calls_itself_cannot_act(browser, run):
    found = gather(run)
    evil = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    named = replace(found, config=replace(found.config, run_name=evil))
    named.plan["memory"]["host"][evil] = 10**6
    page = run / "report.html"
    page.write_text(report_page(named))
    browser.open(page)
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelector('h1').textContent") == evil
    assert browser.console == []
    assert undrawn(browser) == set()


def test_a_run_with_little_to_show_is_shown_without_a_complaint(browser, run):
    for name in ("plan.json", "step.json"):
        (run / "report" / name).unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(lines[0] + "\n")
    browser.open(write_report(run), width=390)
    assert undrawn(browser) == {"timeline", "lanes", "activations"}
    assert browser.console == []
