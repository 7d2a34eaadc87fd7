"""Export from a run: what opens in transformers is what was trained, to the bit; what cannot be done says why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import lohan
from lohan.cli import app
from lohan.engine import create
from lohan.engine import export as engine_export
from lohan.engine.run_folder import read_run_folder
from lohan.errors import ConfigError, ModelError, StoreCorrupt, StoreLocked, StoreMissing
from lohan.models import export as models_export
from lohan.testing.zoo import NAMES, random_batches, tiny_model, tiny_model_folder


@contextmanager
def training(tmp_path: Path, model: object, *, steps: int = 1, **options: object) -> Iterator[lohan.Run]:
    usual = {"ssd": [tmp_path / "a", tmp_path / "b"], "host_memory": "200MB", "device": "cpu", "learning_rate": 1e-3}
    with lohan.open_run(model=model, **(usual | {"weights": [1, 1]} | options)) as run:
        for _ in range(steps):
            run.step(random_batches(257, num_micro_batches=2, batch=1, seq=12, seed=1, step=run.step_number))
        yield run


def trained(tmp_path: Path, name: str = "llama", **options: object) -> dict[str, Tensor]:
    """The weights of a run that was trained for a step and closed."""
    with training(tmp_path, tiny_model_folder(name, tmp_path / "source"), **options) as run:
        return dict(run.read_weights())


def assert_opens_with(folder: Path, expected: dict[str, Tensor]) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    actual = dict(model.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert parameter.dtype == expected[name].dtype
        assert torch.equal(parameter, expected[name]), name


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_run_opens_with_the_trained_weights_to_the_bit(name: str, tmp_path: Path) -> None:
    source = tiny_model_folder(name, tmp_path / "source")
    with training(tmp_path, source) as run:
        run.export(tmp_path / "out")
        weights = dict(run.read_weights())
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {key: value.shape for key, value in after.items()} == {key: value.shape for key, value in before.items()}
    assert any(not torch.equal(before[key].to(torch.bfloat16), after[key]) for key in after)
    assert_opens_with(tmp_path / "out", weights)


def test_a_run_is_exported_by_the_command_when_its_model_is_gone(tmp_path: Path) -> None:
    weights = trained(tmp_path, "mixtral")
    shutil.rmtree(tmp_path / "source")
    code, output = command(tmp_path / "a", tmp_path / "out")
    assert code == 0, output
    assert "of weights" in output
    assert_opens_with(tmp_path / "out", weights)


def test_the_master_weights_can_be_exported(tmp_path: Path) -> None:
    with training(tmp_path, tiny_model_folder("qwen3", tmp_path / "source"), frozen="layers.1") as run:
        masters = {name: master for name, master, _ in run.read_state()}
        weights = dict(run.read_weights())
    assert command(tmp_path / "a", tmp_path / "out", "--master")[0] == 0
    # What is frozen has no master: its weight is all there is.
    assert_opens_with(tmp_path / "out", {name: masters.get(name, weight.float()) for name, weight in weights.items()})
    assert any(not torch.equal(masters[name], weights[name].float()) for name in masters)


@pytest.mark.parametrize("held", [0, 1 << 30])
@pytest.mark.parametrize("master", [True, False])
def test_files_are_written_in_parts_of_a_piece(
    master: bool, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with any tensor of more than a few million elements, and with as little memory as there can be."""
    # A block's tensors share a piece, whose records are several of the store's chunks.
    source = tiny_model_folder("llama", tmp_path / "source", hidden_size=256, intermediate_size=512)
    with training(tmp_path, source) as run:
        masters = {name: values for name, values, _ in run.read_state()}
        weights = dict(run.read_weights())
    monkeypatch.setattr(models_export, "BUFFER_BYTES", 65536)
    monkeypatch.setattr(engine_export, "_MOST_HELD", held)
    lohan.export_run(tmp_path / "a", tmp_path / "out", master=master)
    assert_opens_with(tmp_path / "out", masters if master else weights)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_dtype_can_be_asked_for(dtype: str, tmp_path: Path) -> None:
    weights = trained(tmp_path, "gpt2")
    assert command(tmp_path / "a", tmp_path / "out", "--dtype", dtype)[0] == 0
    wanted = {"fp16": torch.float16, "fp32": torch.float32}[dtype]
    assert_opens_with(tmp_path / "out", {name: weight.to(wanted) for name, weight in weights.items()})
    code, output = command(tmp_path / "a", tmp_path / "other", "--dtype", "int4")
    assert code == 2
    assert "Write bf16, fp16 or fp32" in output


def test_tensors_of_many_pieces_come_out_whole(tmp_path: Path) -> None:
    weights = trained(tmp_path, "gpt_oss", piece_elements=2048)
    lohan.export_run(tmp_path / "a", tmp_path / "out")
    assert_opens_with(tmp_path / "out", weights)
    masters = tmp_path / "masters"
    lohan.export_run(tmp_path / "a", masters, master=True, max_shard_bytes=100_000)
    assert len(list(masters.glob("*.safetensors"))) > 1


def test_small_files_of_the_model_come_with_it(tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "optimizer.pt").write_bytes(b"not this one")
    with training(tmp_path, source) as run:
        run.export(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors",
    }  # fmt: skip


def test_buffers_of_the_checkpoint_are_used_kept_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    stored["model.correction"] = torch.tensor([1.0, 2.0, 3.0]).half()
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    build = create.build_skeleton

    def with_buffer(*args: object, **options: object) -> object:
        model = build(*args, **options)  # type: ignore[arg-type]
        model.model.register_buffer("correction", torch.zeros(3))
        return model

    monkeypatch.setattr(create, "build_skeleton", with_buffer)
    with training(tmp_path, source) as run:
        assert run.model.model.correction.tolist() == [1, 2, 3]
    shutil.rmtree(source)
    with training(tmp_path, None) as run:
        assert run.model.model.correction.tolist() == [1, 2, 3]
        run.export(tmp_path / "out")
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.correction"], stored["model.correction"]
    )
    buffers = tmp_path / "a" / "model" / "buffers.safetensors"
    content = bytearray(buffers.read_bytes())
    content[-1] ^= 1
    buffers.write_bytes(content)
    with pytest.raises(ModelError, match=r"buffers\.safetensors is not what this run wrote there"):
        lohan.export_run(tmp_path / "a", tmp_path / "again")


def test_a_run_made_from_a_module_is_exported_too(tmp_path: Path) -> None:
    with training(tmp_path, tiny_model("qwen3")) as run:
        run.export(tmp_path / "out")
        weights = dict(run.read_weights())
    assert_opens_with(tmp_path / "out", weights)


def test_a_module_without_a_config_has_no_folder_to_be_exported_as(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with training(tmp_path, model) as run:
        (run.folder.model_folder / "config.json").unlink()
        with pytest.raises(ModelError, match="without a transformers config"):
            run.export(tmp_path / "out")


def test_uncommitted_steps_are_finished_and_committed_first(tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    with training(tmp_path, source, steps=3, commit_every=10, keep_nothing_in_memory=True) as run:
        assert run.store.committed_step == 0
        run.export(tmp_path / "out")
        assert run.store.committed_step == 3
        run.step(random_batches(257, num_micro_batches=1, batch=1, seq=12, seed=1, step=9))  # training goes on
        assert run.step_number == 4
    assert command(tmp_path / "a", tmp_path / "later")[0] == 0
    first, later = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "later"))
    assert any(not torch.equal(first[key], later[key]) for key in first)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    code, output = command(tmp_path, tmp_path / "out")
    assert code == 2
    assert "holds no run: it has no run.json" in output
    assert not (tmp_path / "out").exists()


def test_the_second_directory_of_a_run_is_not_the_run(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(StoreMissing, match="the first in `ssd`"):
        lohan.export_run(tmp_path / "b", tmp_path / "out")


def test_a_folder_with_something_in_it_is_never_written_to(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    code, output = command(tmp_path / "a", tmp_path / "out")
    assert code == 2
    assert "exists and is not empty" in output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    code, output = command(tmp_path / "a", tmp_path / "out")
    assert code == 2
    assert "is free there" in output
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_open_cannot_be_exported_from_outside(tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    with training(tmp_path, source), pytest.raises(StoreLocked, match="An export needs the run to itself"):
        lohan.export_run(tmp_path / "a", tmp_path / "out")


def test_a_damaged_weight_is_named_and_nothing_is_exported(tmp_path: Path) -> None:
    trained(tmp_path)
    for drive in ("a", "b"):
        with open(tmp_path / drive / "lohan.data", "r+b") as data:
            content = bytearray(data.read())
            for place in range(0, len(content), 4096):
                content[place] ^= 1
            data.seek(0)
            data.write(content)
    with pytest.raises(StoreCorrupt, match="weights"):
        lohan.export_run(tmp_path / "a", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "source"]


def test_directories_that_have_moved_can_be_named(tmp_path: Path) -> None:
    weights = trained(tmp_path)
    os.rename(tmp_path / "b", tmp_path / "c")
    code, output = command(tmp_path / "a", tmp_path / "out")
    assert code == 2
    assert "--ssd" in output
    code, output = command(tmp_path / "a", tmp_path / "out", "--ssd", tmp_path / "c", "--ssd", tmp_path / "a")
    assert code == 0, output
    assert_opens_with(tmp_path / "out", weights)
    with training(tmp_path / "nowhere", None, steps=0, ssd=[tmp_path / "a", tmp_path / "c"]):
        pass
    assert read_run_folder(tmp_path / "a").info.directories == (str(tmp_path / "a"), str(tmp_path / "c"))
    lohan.export_run(tmp_path / "a", tmp_path / "again")


def test_directories_of_another_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    trained(tmp_path / "one")
    trained(tmp_path / "two")
    with pytest.raises(ConfigError, match="another store than the run"):
        lohan.export_run(tmp_path / "one" / "a", tmp_path / "out", ssd=[tmp_path / "two" / "a", tmp_path / "two" / "b"])


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    weights = trained(tmp_path)
    told: list[tuple[int, int]] = []
    lohan.export_run(tmp_path / "a", tmp_path / "out", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (2 * sum(w.numel() for w in weights.values()),) * 2
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    trained(tmp_path)
    content = json.loads((tmp_path / "a" / "run.json").read_text())
    assert content["model"] == "source"
    assert content["directories"] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert content["settings"]["state_format"] == "split"
    assert content["lohan"] == lohan.__version__
