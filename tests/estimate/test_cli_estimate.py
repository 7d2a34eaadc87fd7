"""`lohan estimate` and `lohan simulate` as a user types them."""

import json
import sys

import pytest

from lohan import cli
from lohan.testing import zoo


@pytest.fixture
def run(capsys, monkeypatch):
    """A command in this process: its exit code, stdout and stderr."""

    def lohan(*arguments):
        monkeypatch.setattr(sys, "argv", ["lohan", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return lohan


def test_a_preset_on_the_testbed_as_json(run):
    code, out, _ = run(
        "estimate", "--model", "gpt-13b", "--machine", "lohan-testbed", "--ssds", 2, "--host-memory", "128GB",
        "--gpu-memory", "20GB", "--batch-size", 32, "--seq-len", 512, "--micro-batch-size", 4, "--steps", 10, "--json",
    )  # fmt: skip
    values = json.loads(out)
    assert code == 0
    assert values["fits"]
    assert values["tokens_per_step"] == 32 * 512
    assert values["micro_batch_size"] == 4
    assert values["gpu_bytes"] <= 20e9
    assert values["host_bytes"] <= 128e9
    assert values["steps"] == 10


def test_a_table_for_people_says_what_holds_it_back(run):
    code, out, _ = run("estimate", "--model", "gpt-6b", "--machine", "lohan-testbed", "--batch-size", 16)
    assert code == 0
    for said in ("time per step", "tokens per second", "bottleneck", "worth buying", "drives' endurance", "energy"):
        assert said in out


def test_a_comparison_says_what_is_only_simulated(run):
    code, out, _ = run(
        "estimate", "--model", "gpt-6b", "--machine", "lohan-testbed", "--batch-size", 16, "--compare", "--json"
    )
    assert code == 0
    assert {one["strategy"]: one["simulated_only"] for one in json.loads(out)}["g10"]


def test_what_does_not_fit_is_exit_code_1(run):
    code, out, _ = run("estimate", "--model", "gpt-412b", "--machine", "lohan-testbed")
    assert code == 1
    assert "does not fit" in out
    code, _, err = run("simulate", "--model", "gpt-412b", "--machine", "lohan-testbed")
    assert code == 1
    assert "gpu_memory" in err


def test_a_folder_with_only_a_config(run, tmp_path):
    zoo.tiny_config("qwen3").save_pretrained(tmp_path / "tiny")
    code, out, _ = run(
        "estimate", "--model", tmp_path / "tiny", "--machine", "lohan-testbed", "--batch-size", 4, "--json"
    )
    assert code == 0
    assert json.loads(out)["model"] == "tiny"


def test_mistakes_are_one_message(run):
    code, _, err = run("estimate", "--model", "gpt-13b", "--machine", "nowhere")
    assert code == 2
    assert "Known are: lohan-testbed" in err
    code, _, err = run("estimate", "--model", "gpt-14b", "--machine", "lohan-testbed")
    assert code == 2
    assert "no preset" in err


def test_simulate_writes_a_trace_and_a_page(run, tmp_path):
    trace, page = tmp_path / "out.json", tmp_path / "out.html"
    code, out, _ = run(
        "simulate", "--model", "gpt-1.55b", "--machine", "lohan-testbed", "--batch-size", 8, "--trace", trace,
        "--html", page,
    )  # fmt: skip
    assert code == 0
    assert "s per step of 8,192 tokens" in out
    assert {event.get("ph") for event in json.loads(trace.read_text())["traceEvents"]} >= {"X"}
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_without_a_machine_this_one_is_measured(run, monkeypatch):
    import lohan.measure.machine
    from lohan.hardware import load_machine

    asked = []
    monkeypatch.setattr(
        lohan.measure.machine, "profile_machine", lambda paths: asked.append(paths) or load_machine("lohan-testbed")
    )
    code, _, err = run("estimate", "--model", "gpt-1.55b", "--batch-size", 4, "--ssd", "/tmp", "--json")
    assert code == 0
    assert [str(path) for path in asked[0]] == ["/tmp"]
    assert "measuring this machine" in err
