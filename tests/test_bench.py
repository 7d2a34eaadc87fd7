"""The harness behind `make bench`: its arithmetic, its tables, its results file, and the workers that need no peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bench
import draw_bench
from peers import checking
from peers.driving import Worker, WorkerFailed
from peers.findings import (
    HEADINGS,
    Findings,
    Limits,
    Record,
    Turn,
    json_rows,
    limit_line,
    limits_at,
    loss_distance,
    point_rows,
    read_findings,
    share_of_drive,
    text_table,
)
from peers.serving import Job
from peers.systems import SYSTEMS


def turn(number: int, *seconds: float, losses: dict[str, float] | None = None, **more: float) -> Turn:
    return Turn(
        round=number, seconds=list(seconds), losses=losses or {}, peak_rss=3_000_000_000 + number, read_bytes=6e8,
        write_bytes=4e8, more=more,
    )  # fmt: skip


def record(system: str, *turns: Turn) -> Record:
    return Record(parameters="60M", tokens=1024, system=system, turns=list(turns))


@pytest.fixture
def findings() -> Findings:
    return Findings(
        records=[
            record("pytorch", turn(1, 1.0, 1.2, losses={"1": 8.0, "2": 7.0})),
            record("lohan", turn(1, 2.0, 2.2, losses={"1": 8.0}), turn(2, 2.1, 4.0, losses={"2": 7.25, "3": 1.0})),
            record("cores", turn(1, 1.0, compute_seconds=0.7, update_seconds=0.2, checksum_rate=1e10)),
            record("drive", turn(1, 1.0, alone_seconds=0.5, alone_bytes=1e9, read_rate=4e9, write_rate=2e9)),
            Record(parameters="60M", tokens=1024, system="deepspeed-nvme", failed="it ended with code 1"),
        ]
    )


def test_a_step_s_time_is_the_median_over_all_rounds(findings):
    ours = findings.find("60M", 1024, "lohan")
    assert ours.seconds == pytest.approx(2.15)
    assert ours.spread == pytest.approx(2.0 / 2.15)
    assert ours.peak_rss == 3_000_000_002
    assert ours.ssd_bytes == 1e9


def test_the_limit_is_the_busiest_resource_s_own_time():
    limits = Limits(0.7, 0.2, 1e10, 2e9, plain_seconds=1.1)
    ours, peer = SYSTEMS["lohan"], SYSTEMS["deepspeed-nvme"]
    assert limits.seconds(ours, 1e9) == pytest.approx(1.0)  # cores: 0.7 + 0.2 + 1e9 / 1e10
    assert limits.seconds(ours, 4e9) == pytest.approx(2.0)  # the drive: 4e9 / 2e9
    assert limits.seconds(peer, 1e9) == pytest.approx(1.1)  # a peer has no checksums and computes as plain PyTorch
    assert limits.seconds(SYSTEMS["pytorch"], 0) == pytest.approx(1.1)


def test_no_limit_is_made_up_where_none_was_measured(findings):
    findings.records = [one for one in findings.records if one.system != "drive"]
    assert limits_at(findings, ("60M", 1024)) is None
    assert all(row["seconds_over_limit"] is None for row in json_rows(findings))


def test_the_last_line_has_a_row_for_every_system_that_ran(findings):
    rows = json_rows(findings)
    assert [row["system"] for row in rows] == ["pytorch", "lohan"]
    assert rows[1] == {
        "system": "lohan", "parameters": 59_775_360, "tokens": 1024, "tokens_per_second": 476.28,
        "peak_rss_bytes": 3_000_000_002, "ssd_bytes_per_step": 1_000_000_000, "seconds_over_limit": 2.15,
    }  # fmt: skip


def test_losses_are_compared_step_by_step(findings):
    plain = findings.find("60M", 1024, "pytorch")
    assert loss_distance(findings.find("60M", 1024, "lohan"), plain) == 0.25
    assert loss_distance(findings.find("60M", 1024, "cores"), plain) is None


def test_loading_is_judged_by_the_drive_s_own_rates(findings):
    drive = findings.find("60M", 1024, "drive")
    done = {"seconds": 2.0, "read_bytes": 4e9, "write_bytes": 1e9, "peak_rss": 0}
    assert share_of_drive(done, drive) == pytest.approx(0.75)


def test_the_table_shows_what_did_not_run_and_why(findings):
    rows = point_rows(findings, ("60M", 1024))
    assert [row[0] for row in rows] == ["pytorch", "deepspeed-nvme", "lohan"]
    assert rows[1][1] == "did not run: it ended with code 1"
    lines = text_table(HEADINGS, rows).splitlines()
    assert lines[0].index("step s") + len("step s") == lines[1].index("1.10") + len("1.10")


def test_a_results_file_comes_back_as_it_was(findings, tmp_path):
    findings.checks["lohan"] = {"ok": True, "update_distance": 0.01}
    findings.save(tmp_path / "found.json")
    assert read_findings(tmp_path / "found.json") == findings


def test_the_page_has_every_point_and_every_change(findings):
    text = draw_bench.page(findings, {})
    assert "## 60M (59,775,360 parameters), 1024 tokens per step" in text
    assert "max_in_cpu" in text


@pytest.mark.parametrize(("moved", "ok"), [(1.0, True), (0.98, True), (-1.0, False), (0.0, False)])
def test_an_update_the_other_way_is_found_wrong(tmp_path, moved, ok):
    generator = torch.Generator().manual_seed(0)
    start = {"a": torch.randn(64, 64, generator=generator), "b": torch.randn(64, generator=generator)}
    update = {name: 1e-3 * torch.randn(value.shape, generator=generator) for name, value in start.items()}
    for folder, share in (("start", 0.0), ("plain", 1.0), ("other", moved)):
        (tmp_path / folder).mkdir()
        save_file({name: start[name] + share * update[name] for name in start}, tmp_path / folder / "model.safetensors")
    plain, other = (checking.Trained([8.0, 7.9], tmp_path / name) for name in ("plain", "other"))
    found = checking.compare(tmp_path / "start", plain, other, exact=True)
    assert found["ok"] is ok
    assert found["equal_to_the_bit"] is (moved == 1.0)
    assert found["wrong_tensors"] == (0 if ok else 2)


def test_a_step_whose_cores_the_host_took_counts_only_if_no_calmer_one_can_be_had():
    def said(number: int, stolen: float) -> dict[str, float]:
        return {
            "number": number, "seconds": float(number), "loss": 1.0, "peak_rss": 1, "read_bytes": 0, "write_bytes": 0,
            "stolen": stolen,
        }  # fmt: skip

    # The first is warm-up. Calm steps count in their order, however calm; then the ones with the least stolen.
    steps = [said(1, 0.0), said(2, 0.3), said(3, 0.015), said(4, 0.1), said(5, 0.0)]
    assert bench.turn_of(1, steps, 1, 2).seconds == [3.0, 5.0]
    assert bench.turn_of(1, steps[:4], 1, 1).seconds == [3.0]
    found = bench.turn_of(1, steps, 1, 3)
    assert (found.seconds, found.stolen) == ([3.0, 5.0, 4.0], 0.1)


def test_whose_steps_the_host_disturbed_is_told(findings):
    assert "The host" not in limit_line(findings, ("60M", 1024))
    findings.find("60M", 1024, "lohan").turns[1].stolen = 0.071
    assert limit_line(findings, ("60M", 1024)).endswith("more than 2% of the cores in a step of lohan (7%).")


def test_a_worker_that_ends_early_says_why(tmp_path):
    (tmp_path / "empty").mkdir()
    job = Job(
        folder=str(tmp_path / "empty"), directory=str(tmp_path / "own"), shape="tiny", tokens=64, micro_batch_tokens=64
    )
    with pytest.raises(WorkerFailed, match=r"pytorch ended with code 1: .*Error"):
        Worker(SYSTEMS["pytorch"], job)
    assert not (tmp_path / "own").exists()


def test_ours_has_more_memory_at_1b_with_few_tokens_and_nobody_else_has():
    def memory(name: str, shape: str, tokens: int) -> object:
        return SYSTEMS[name].options_for(shape, tokens).get("host_memory")

    assert [memory("lohan", "1B", tokens) for tokens in (256, 512, 4096)] == [
        3_200_000_000,
        2_700_000_000,
        2_700_000_000,
    ]
    assert memory("lohan", "250M", 256) == memory("lohan", "250M", 4096)
    assert memory("deepspeed-nvme", "1B", 256) is None


def test_tokens_that_are_no_whole_sequences_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--tokens", "700"])
    assert ended.value.code == 2
    assert "--tokens 700: sequences have 512 tokens" in capsys.readouterr().err


def test_a_benchmark_runs_ends_with_its_line_and_goes_on(tmp_path, capsys):
    results = tmp_path / "found.json"
    options = ["--parameters", "tiny", "--tokens", "64", "--systems", "pytorch", "lohan-fp32", "--rounds", "2"]
    options += ["--check-parameters", "tiny", "--directory", str(tmp_path / "drive")]
    assert bench.main([*options, "--save", str(results)]) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = json.loads(printed[-1])
    assert [row["system"] for row in rows] == ["pytorch", "lohan-fp32"]
    assert all(row["tokens_per_second"] > 0 and row["seconds_over_limit"] > 0 for row in rows)
    assert rows[0]["ssd_bytes_per_step"] == 0
    state = 16 * rows[1]["parameters"]  # an fp32 weight, its master and two moments
    assert state < rows[1]["ssd_bytes_per_step"] < 4 * state
    findings = read_findings(results)
    assert findings.checks["lohan-fp32"]["equal_to_the_bit"], findings.checks
    assert loss_distance(*(findings.find("tiny", 64, name) for name in ("lohan-fp32", "pytorch"))) == 0
    assert [len(one.turns) for one in findings.records] == [2, 2, 2, 2]
    assert not list((tmp_path / "drive").iterdir())
    del findings.find("tiny", 64, "pytorch").turns[1:]  # as if it had been interrupted
    findings.save(results)
    assert bench.main([*options, "--resume", str(results)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sum("round" in line for line in printed) == 1
    assert [row["system"] for row in json.loads(printed[-1])] == ["pytorch", "lohan-fp32"]


def test_a_benchmark_in_pieces_says_what_is_left_and_keeps_its_models(tmp_path, capsys):
    results, models = tmp_path / "new" / "found.json", tmp_path / "models"
    options = ["--parameters", "tiny", "--tokens", "64", "--systems", "pytorch", "--rounds", "2", "--counted", "1"]
    options += ["--no-check", "--no-limit", "--directory", str(tmp_path / "drive"), "--models", str(models)]
    options += ["--resume", str(results)]
    assert bench.main([*options, "--minutes", "0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2] == f"2 turns are left after 0 minutes: run it again with --resume {results}"
    assert json.loads(printed[-1]) == []
    assert not any("did not run" in line for line in printed)
    assert bench.main(options) == 0
    printed = capsys.readouterr().out.splitlines()
    assert not any("left" in line for line in printed)
    [found] = read_findings(results).records
    assert [len(turn.seconds) for turn in found.turns] == [1, 1]
    assert [one.name for one in models.iterdir()] == ["model-tiny"]


def test_every_change_to_a_peer_has_its_reason():
    from peers.systems import CHANGES

    named = {name for one in CHANGES for name in one.systems.split(", ")}
    assert {"deepspeed-nvme", "deepspeed-cpu", "fsdp2-cpu"} <= named <= {*SYSTEMS, "all but ours"}
    assert all(len(one.reason) > 20 for one in CHANGES)


def test_batches_are_the_same_however_they_are_cut():
    from peers.workloads import batches

    whole = [batch["input_ids"] for batch in batches(3, 4096, 4096, 1000)]
    parts = [batch["input_ids"] for batch in batches(3, 4096, 2048, 1000)]
    assert [tuple(part.shape) for part in parts] == [(4, 512), (4, 512)]
    assert torch.equal(torch.cat(whole), torch.cat(parts))


def test_results_are_never_half_written(findings, tmp_path):
    path = tmp_path / "found.json"
    findings.save(path)
    findings.save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["found.json"]
    assert Path(path).read_text().startswith("{")
