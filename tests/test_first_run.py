"""The first run works, cleans up after itself, and touches nothing that is not its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lohan
from lohan import first_run, first_training
from lohan.errors import ConfigError, LohanError, StoreLocked
from lohan.models import load
from lohan.profiles import DriveProfile, MachineProfile
from lohan.store import Files, create_store, open_arena, open_store
from lohan.store.report import describe_store, verify_directories
from lohan.train import loop
from lohan.train.config_file import load_config

SIZE = 8 << 20


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(first_training, "PROFILE_SECONDS", 0.5)
    monkeypatch.setattr(first_training, "HIDDEN_SIZE", 64)
    monkeypatch.setattr(first_training, "ASKED", 16)
    monkeypatch.setattr(first_training, "ROWS", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_whole_first_run(tmp_path, capsys):
    first_run.run(tmp_path / "own", SIZE, keep=False, steps=3)
    out = " ".join(capsys.readouterr().out.split())
    for words in ("step 3 is whole", "a writer died after", "B/s", "held-out loss 5.", "of 16 sorted right"):
        assert words in out
    assert "every weight is the trained one, to the bit" in out
    assert "$ lohan train" in out
    assert "of 6 parts of the model stayed in memory" in out
    assert "s foretold" in out
    assert "lohan doctor" in out
    page = tmp_path / "own" / first_run.REPORT_NAME
    assert f"The training's report is {page}" in out
    assert "Finished: 3 of 3 steps" in page.read_text()
    assert {path.name for path in page.parent.iterdir()} == {page.name, first_run.MARK_NAME}
    with first_run.own_folder(tmp_path / "own", keep=False):
        assert not page.exists()
    assert not (tmp_path / "own").exists()


def test_no_part_of_its_model_finds_room_in_memory(tmp_path, monkeypatch):
    monkeypatch.undo()  # the real one
    first_training.make_model(tmp_path / "model")
    monkeypatch.setattr(first_training, "_CONFIG", first_training._CONFIG.replace("machine:", "# machine:"))
    budget = first_training.least_memory(load_config(first_training.write_task(tmp_path, steps=5)))
    config = load_config(first_training.write_task(tmp_path, steps=5, memory=budget))
    previews = []

    def call_off(ahead):
        previews.append(ahead)
        raise LohanError("seen enough")

    with pytest.raises(LohanError, match="seen enough"):
        loop.train(config, live=False, say=lambda text: None, on_preview=call_off)
    assert (previews[0].resident_units, previews[0].num_units) == (0, 6)
    # Every byte of weights and state passes by in every step: 16 bytes a parameter and more.
    assert previews[0].read_bytes_per_step + previews[0].write_bytes_per_step > 16 * previews[0].num_parameters


def test_it_can_be_kept_looked_at_and_repeated(tmp_path, capsys, monkeypatch):
    machine = MachineProfile(
        name="desk", gpu_name="cpu", gpu_flops_per_second=4e9, gpu_memory_bytes=8 * 10**9, separate_memory=False,
        to_gpu_bytes_per_second=1e12, to_host_bytes_per_second=1e12, host_memory_bytes=8 * 10**9,
        drives=(DriveProfile(read_bytes_per_second=2e9, write_bytes_per_second=1e9),), update_parameters_per_second=2e8,
    )  # fmt: skip
    monkeypatch.setattr("lohan.measure.machine.profile_machine", lambda *_, **__: machine)  # measured in the test above
    for _ in range(2):
        first_run.run(tmp_path / "own", SIZE, keep=True, steps=1)
        drives = [tmp_path / "own" / name for name in first_run.DRIVE_NAMES]
        assert describe_store(drives)["committed_step"] == 3
        assert verify_directories(drives)["problems"] == []
    json.dumps(describe_store(drives))
    training = tmp_path / "own" / first_run.TRAINING_NAME
    assert describe_store([training / "ssd"])["committed_step"] == 1
    assert json.loads((training / "trace.json").read_text())["traceEvents"]
    lohan.export_run(training / "ssd", training / "again")
    first, again = (load_file(training / name / "model.safetensors") for name in ("out/model", "again"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert f"store verify {drives[0]} {drives[1]}" in capsys.readouterr().out.replace("\n", "")


def test_a_folder_that_is_not_its_own_is_refused_and_left_alone(tmp_path):
    precious = tmp_path / "drive-a" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(ConfigError, match="not made by a first run"):
        first_run.run(tmp_path, SIZE, keep=False)
    assert precious.read_text() == "mine"


def test_what_others_put_into_its_folder_stays(tmp_path):
    folder = tmp_path / "own"
    with first_run.own_folder(folder, keep=True):
        (folder / "notes.txt").write_text("mine")
    with first_run.own_folder(folder, keep=False):
        pass
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_link_in_place_of_a_drive_is_removed_and_not_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious.txt").write_text("mine")
    with first_run.own_folder(tmp_path / "own", keep=True) as drives:
        drives[0].rmdir()
        drives[0].symlink_to(target)
    with first_run.own_folder(tmp_path / "own", keep=False):
        pass
    assert (target / "precious.txt").read_text() == "mine"


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "own").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        first_run.run(tmp_path / "own", SIZE, keep=False)


def test_its_folder_goes_even_when_the_run_fails(tmp_path):
    def fail() -> None:
        with first_run.own_folder(tmp_path / "own", keep=False):
            raise LohanError("no")

    with pytest.raises(LohanError, match="no"):
        fail()
    assert not (tmp_path / "own").exists()


def test_a_second_first_run_in_the_same_folder_is_turned_away(tmp_path, monkeypatch):
    def taken(self: Files, path: Path) -> int:
        raise BlockingIOError

    monkeypatch.setattr(Files, "lock", taken)
    with pytest.raises(StoreLocked, match="Another first run"):
        first_run.run(tmp_path / "own", SIZE, keep=False)


def test_a_size_too_small_to_mean_anything_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least"):
        first_run.run(tmp_path / "own", 1, keep=False)


def test_a_record_that_comes_back_different_is_noticed(tmp_path):
    records = first_run.make_records(SIZE)
    create_store([tmp_path / "a"], records)
    with open_store([tmp_path / "a"]) as store, open_arena(SIZE) as arena:
        store.begin(1)
        first_run.write_step(store, arena, 1)
        first_run.check_step(store, arena, 1)
        with pytest.raises(LohanError, match="'embedding' of step 2 came back different"):
            first_run.check_step(store, arena, 2)


def test_records_are_unlike_and_add_up():
    records = first_run.make_records(512 << 20)
    sizes = [record.num_bytes for record in records]
    assert sum(sizes) == pytest.approx(512 << 20, rel=0.001)
    assert min(sizes) == 100
    assert max(sizes) == 128 << 20
    assert any(size % 4096 for size in sizes)


def test_the_rate_counts_overlapping_requests_once():
    busy = first_run.Busy()
    busy("read", 0, "r", 100, 1.0, 2.0)
    busy("read", 1, "r", 100, 1.5, 3.0)
    busy("read", 0, "r", 100, 10.0, 11.0)
    assert busy.rate("read") == pytest.approx(300 / 3)


def test_the_questions_are_the_same_every_time_and_none_is_in_the_test(tmp_path):
    first_training.write_task(tmp_path, steps=first_training.STEPS)
    asked = {name: (tmp_path / f"{name}.jsonl").read_text() for name in ("train", "eval")}
    first_training.write_task(tmp_path, steps=first_training.STEPS)
    assert asked == {name: (tmp_path / f"{name}.jsonl").read_text() for name in ("train", "eval")}
    trained, held_out = ({json.loads(line)["prompt"] for line in text.splitlines()} for text in asked.values())
    assert trained.isdisjoint(held_out)
    new = {question for question, _ in first_training.questions(first_training._ASKED, first_training.ASKED)}
    assert len(new) == first_training.ASKED
    assert new.isdisjoint(trained | held_out)
    config = load_config(tmp_path / first_training.CONFIG_NAME)
    assert config.max_steps == first_training.STEPS


def test_the_tokenizer_has_a_token_for_every_byte():
    tokenizer = first_training.make_tokenizer()
    assert len(tokenizer) == 259
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    text = "".join(map(chr, range(32, 500))) + "\n\u4e2d"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_an_export_that_is_not_what_was_trained_is_noticed(tmp_path):
    first_training.make_model(tmp_path / "model")
    load(tmp_path / "model", ssd=tmp_path / "ssd")
    lohan.export_run(tmp_path / "ssd", tmp_path / "export")
    first_training.check_export(tmp_path / "export", tmp_path / "ssd")
    stored = load_file(tmp_path / "export" / "model.safetensors")
    stored["lm_head.weight"] = stored["lm_head.weight"] + 1
    save_file(stored, tmp_path / "export" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LohanError, match=r"lm_head.weight is not what was trained"):
        first_training.check_export(tmp_path / "export", tmp_path / "ssd")
