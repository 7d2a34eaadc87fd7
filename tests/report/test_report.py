"""What a run leaves behind, and what the report makes of it: whole, in part, or of a run that is still under way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from small_runs import make_config

from lohan import cli
from lohan.report import figures, words
from lohan.report.gather import gather
from lohan.report.page import report_page, write_report
from lohan.store import open_store
from lohan.train import loop
from lohan.train.config_file import dump_config, load_config
from lohan.train.metrics import read_metrics

CHARTS = ("loss", "rate", "norm", "learning_rate", "timeline", "lanes", "tiers", "activations")


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def left(run: Path, name: str) -> dict:
    return json.loads((run / "report" / name).read_text())


def change_metrics(run: Path, change) -> None:
    lines = [change(line) for line in read_metrics(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_training_leaves_its_plan_and_a_late_step_in_two_small_files(run):
    plan, step = left(run, "plan.json"), left(run, "step.json")
    assert sorted(path.name for path in (run / "report").iterdir()) == ["plan.json", "step.json"]
    assert sum(path.stat().st_size for path in (run / "report").iterdir()) < 100_000
    assert (plan["after_step"], plan["total_steps"]) == (0, 5)
    assert plan["versions"].keys() >= {"lohan", "torch", "transformers", "Python"}
    assert step["step"] == 5
    busy = {"gpu", "cpu_update", "ssd_write"}  # with a model this small the planner may find room for all weights
    assert step["lanes"].keys() >= busy
    assert 0 < step["busy"]["ssd"] <= step["seconds"]
    predicted = plan["predicted"]["steps"][step["clip"]]
    assert predicted["lanes"].keys() == step["lanes"].keys()
    assert 0 < predicted["busy"]["gpu"] <= predicted["seconds"]


def test_what_is_predicted_is_what_was_told_before_the_run(run):
    plan = left(run, "plan.json")
    told = plan["preview"]
    assert plan["predicted"]["steps"][plan["plan"]["clip"]]["seconds"] == told["seconds_per_step"]
    staged = told["staging_bytes"] + told["compute_bytes"]
    assert sum(plan["memory"]["host"].values()) == pytest.approx(staged, rel=0.05)


def test_the_chosen_point_lies_on_the_curve_and_no_other_is_better(run):
    curve = left(run, "plan.json")["predicted"]["curve"]
    places = [(p["device"] + p["host"] + p["ssd"], p["forward"] + p["backward"]) for p in curve["points"]]
    chosen = curve["chosen"]
    here = chosen["device"] + chosen["host"] + chosen["ssd"], chosen["forward"] + chosen["backward"]
    assert len(places) > 3
    assert any(here == pytest.approx(place) for place in places)
    assert chosen["simulated"] <= 1.002 * min(p["simulated"] for p in curve["points"] if p.get("simulated"))


@pytest.mark.parametrize(("tier", "over"), [("ssd", "sent off the device"), ("device", "kept for backward")])
def test_the_curve_is_over_what_changes_along_it(run, tier, over):
    plan = left(run, "plan.json")
    curve = plan["predicted"]["curve"] | {"swapped": True}
    for point in (*curve["points"], curve["chosen"]):
        size = point["device"] + point["host"] + point["ssd"]
        point.update({"device": 0, "host": 0, "ssd": 0, tier: size})
    plan["predicted"]["curve"] = curve
    (run / "report" / "plan.json").write_text(json.dumps(plan))
    drawn = figures.activation_curve(gather(run))
    assert drawn["x"] == over
    assert len({point["x"] for point in drawn["points"]}) > 3


def test_upgrades_are_never_a_loss(run):
    found = left(run, "plan.json")["predicted"]["upgrades"]
    assert {one["name"] for one in found} >= {"one more SSD", "64 GB more RAM", "twice the tokens per step"}
    assert all(one["gain"] is None or one["gain"] >= 1 for one in found)
    assert max(one["gain"] or 0 for one in found) > 1.2  # a device twice as fast: this run only computes


def test_the_report_of_a_whole_run_has_every_chart_and_every_figure(run):
    page = report_page(gather(run))
    data = data_of(page)
    assert tuple(data) == CHARTS
    assert page.count('class="missing"') == 1  # where there are no scripts
    metrics = read_metrics(run)
    loss = [[line["step"], line["loss"]] for line in metrics if "loss" in line]
    held_out = [[line["step"], line["eval_loss"]] for line in metrics if "eval_loss" in line]
    assert [line["points"] for line in data["loss"]["lines"]] == [loss, held_out]
    assert data["timeline"]["predicted"]["lanes"]
    assert data["timeline"]["measured"]["step"] == 5
    rows = {row["name"]: row for row in data["lanes"]["rows"]}
    assert rows["the whole step"]["measured"] == left(run, "step.json")["seconds"]
    assert rows["computing"]["measured"] == pytest.approx(
        next(line for line in metrics if line.get("step") == 5 and "loss" in line)["busy_seconds"]["compute"]
    )
    tiers = {row["name"]: row for row in data["tiers"]["rows"]}
    assert tiers["RAM"]["budget"] == left(run, "plan.json")["preview"]["host_bytes"]
    assert 0 < tiers["RAM"]["measured"] <= tiers["RAM"]["budget"]
    for row in ("SSD read per step", "SSD written per step"):
        assert tiers[row]["measured"] == pytest.approx(tiers[row]["parts"][0][1], rel=0.02), row
    for said in (
        "Finished: 5 of 5 steps",
        "model on data.jsonl",
        "is the limit",
        "a device twice as fast",
        "learning_rate",
    ):
        assert said in page


def test_bytes_written_and_wear_are_summed_over_all_steps(run):
    written = sum(line["ssd_written_bytes"] for line in read_metrics(run) if "loss" in line)
    total, share, whose = figures.wear(gather(run))
    assert (total, share) == (written, pytest.approx(written / 6e14))
    assert whose == "what the drives are rated for"


def test_a_run_without_a_machine_profile_says_that_nothing_was_predicted(trained, tmp_path):
    config = make_config(trained, output_dir=str(tmp_path / "out"), ssd=(str(tmp_path / "ssd"),), machine=None)
    loop.train(config, live=False, say=lambda text: None)
    page = report_page(gather(tmp_path / "out"))
    assert left(tmp_path / "out", "plan.json")["predicted"] is None
    assert page.count("Nothing was predicted: the run had no machine profile") >= 2
    assert "activations" not in data_of(page)
    timeline = data_of(page)["timeline"]
    assert timeline["predicted"] is None
    assert timeline["measured"]["lanes"]["gpu"]


def test_an_old_run_that_left_nothing_behind_still_has_its_curves(run):
    shutil.rmtree(run / "report")
    change_metrics(run, lambda line: {k: v for k, v in line.items() if k != "ssd_written_bytes"})
    page = report_page(gather(run))
    assert tuple(data_of(page)) == ("loss", "rate", "norm", "learning_rate")  # no bytes: those were not counted yet
    assert "This run left no plan behind" in page


@pytest.mark.parametrize("name", ["plan.json", "step.json"])
@pytest.mark.parametrize("content", ["", '{"step": 3', "[]", '{"other": 1}'])
def test_a_file_that_was_cut_off_is_as_good_as_none(run, name, content):
    (run / "report" / name).write_text(content)
    assert {"loss", "rate"} <= data_of(report_page(gather(run))).keys()


def test_a_run_without_any_step_yet_says_so(run):
    (run / "metrics.jsonl").write_text("")
    (run / "report" / "step.json").unlink()
    page = report_page(gather(run))
    assert "No step has been taken yet" in page
    assert data_of(page)["timeline"]["measured"] is None


def test_a_run_that_is_training_is_reported_as_it_stands(trained, run):
    (run / "status.json").write_text(json.dumps({"state": "running", "pid": os.getpid(), "total_steps": 9}))
    with open_store([trained / "ssd"]):
        page = report_page(gather(run), now=0.0)
    assert "Still training: step 5 of 9 when this page was made" in page
    assert "Not running and not finished: step 5 of 9" in report_page(gather(run))


def test_numbers_that_are_none_or_not_finite_leave_gaps(run):
    change_metrics(run, lambda line: line | ({"grad_norm": None} if line["step"] % 2 else {"tokens_per_second": "?"}))
    data = data_of(report_page(gather(run)))
    assert [x for x, _ in data["norm"]["lines"][0]["points"]] == [2, 4]
    assert [x for x, _ in data["rate"]["lines"][0]["points"]] == [1, 3, 5]


def test_a_long_run_is_drawn_in_few_points_that_hide_no_peak(run):
    line = next(line for line in read_metrics(run) if "loss" in line)
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, 20_001):
            file.write(json.dumps(line | {"step": step, "loss": 100.0 if step == 7_777 else 1 / step}) + "\n")
    page = report_page(gather(run))
    drawn = data_of(page)["loss"]["lines"][0]
    assert len(drawn["points"]) == figures.MAX_POINTS
    assert max(high for _, _, high in drawn["band"]) == 100.0
    assert len(page) < 500_000


def test_a_run_that_goes_on_is_told_from_its_last_start(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    tell = loop._Loop._tell

    def told(self, out):
        tell(self, out)
        if out.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(loop._Loop, "_tell", told)
        assert loop.train(config, live=False, say=lambda text: None).stopped == "interrupted"
    assert left(tmp_path / "out", "step.json")["step"] == 3
    assert "Stopped by hand after step 3 of 5" in report_page(gather(tmp_path / "out"))
    loop.train(config, live=False, say=lambda text: None)
    plan = (tmp_path / "out" / "report" / "plan.json").read_text()
    assert json.loads(plan)["after_step"] == 3
    assert left(tmp_path / "out", "step.json")["step"] == 5
    found = gather(tmp_path / "out")
    assert [line["step"] for line in figures.recent(found)] == [5]
    assert len(data_of(report_page(found))["loss"]["lines"][0]["points"]) == 5
    loop.train(config, live=False, say=lambda text: None)  # nothing is left to do, and nothing is told anew
    assert (tmp_path / "out" / "report" / "plan.json").read_text() == plan


def test_advice_names_the_best_or_says_that_nothing_helps(run):
    assert words.advice(gather(run))[0].startswith("Planned again, a device twice as fast gives most: +")
    plan = left(run, "plan.json")
    for one in plan["predicted"]["upgrades"]:
        one["gain"] = 1.01
    (run / "report" / "plan.json").write_text(json.dumps(plan))
    assert words.advice(gather(run))[0].startswith("None of these gives more than 3%")


def test_a_prediction_that_is_far_off_is_remarked_upon(run):
    foretold = figures.predicted_step(gather(run))["seconds"]
    change_metrics(run, lambda line: line | {"seconds": 1.05 * foretold})
    assert not any("apart" in said for said in words.bottleneck(gather(run)))
    change_metrics(run, lambda line: line | {"seconds": 1.2 * foretold})
    assert any("apart" in said for said in words.bottleneck(gather(run)))


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)


def test_nothing_of_a_run_can_become_part_of_the_page(run):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>@DATA@&amp;"
    config = load_config(run / "config.yaml")
    (run / "config.yaml").write_text(dump_config(type(config)(**{**fields_of(config), "run_name": evil})))
    plan = left(run, "plan.json")
    plan["versions"]["lohan"] = evil
    plan["predicted"]["upgrades"][0]["name"] = evil
    plan["memory"]["host"][evil] = 5
    (run / "report" / "plan.json").write_text(json.dumps(plan))
    page = report_page(gather(run))
    tags = Tags()
    tags.feed(page)
    assert tags.found.count("script") == 2
    assert "img" not in tags.found
    assert [evil, 5] in next(row for row in data_of(page)["tiers"]["rows"] if row["name"] == "RAM")["parts"]


def fields_of(config) -> dict:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.fixture
def lohan(capsys, monkeypatch):
    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lohan", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        told = capsys.readouterr()
        return int(end.value.code or 0), told.out, told.err

    return call


def test_the_command_writes_the_page_and_prints_where(run, trained, tmp_path, lohan):
    assert lohan("report", run) == (0, f"{run / 'report.html'}\n", "")
    assert (run / "report.html").read_text().endswith("</html>\n")
    other = tmp_path / "page.html"
    assert lohan("report", trained / "ssd", "--out", other)[:2] == (0, f"{other}\n")
    assert lohan("report", run, "--out", tmp_path)[1] == f"{tmp_path / 'report.html'}\n"


def test_what_is_no_run_is_refused_in_one_sentence(tmp_path, run, lohan):
    code, out, err = lohan("report", tmp_path)
    assert (code, out) == (2, "")
    assert "holds no run of `lohan train`" in " ".join(err.split())
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(make_config(tmp_path)))
    code, _, err = lohan("report", config)
    assert code == 2
    assert "has not begun" in " ".join(err.split())
    code, _, err = lohan("report", run, "--out", tmp_path / "none" / "page.html")
    assert code == 2
    assert "Name another file with --out" in " ".join(err.split())


def test_an_output_dir_can_be_moved_before_it_is_reported(run, tmp_path):
    moved = run.rename(tmp_path / "elsewhere")
    assert write_report(moved) == moved / "report.html"
    assert len(data_of((moved / "report.html").read_text())) == len(CHARTS)
