"""Folders out: what is exported opens in from_pretrained and is equal to the bit; a failure leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lohan.errors import ModelError
from lohan.models import export
from lohan.models.checkpoint import match_folder
from lohan.models.export import ExportTensor, export_folder
from lohan.models.folder import open_folder
from lohan.models.skeleton import build_skeleton
from lohan.models.units import partition
from lohan.testing.zoo import NAMES, tiny_model, tiny_model_folder


def exported(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[ExportTensor]:
    return [ExportTensor(name, tensor.dtype, tuple(tensor.shape), reader_of(tensor)) for name, tensor in tensors]


def reader_of(tensor: torch.Tensor):
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()

    def read(into: memoryview, start_byte: int, num_bytes: int) -> None:
        assert len(into) == num_bytes
        into[:] = memoryview(raw)[start_byte : start_byte + num_bytes]

    return read


def trained(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights that are not those of the source folder."""
    return {key: parameter.detach().to(dtype) for key, parameter in tiny_model(name, seed=5).named_parameters()}


def assert_opens_with(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    actual = dict(model.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert parameter.dtype == expected[name].dtype
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_exported_folder_opens_with_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = tiny_model_folder(name, tmp_path / "source")
    weights = trained(name, dtype)
    export_folder(tmp_path / "out", source, exported(weights.items()), max_shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_opens_with(tmp_path / "out", weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_weights_go_back_into_the_layout_they_came_in(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = tiny_model_folder(name, tmp_path / "source")
    model = build_skeleton(source, compute_dtype=torch.float32)
    weights = trained(name, dtype)
    with open_folder(source) as folder:
        checkpoint = match_folder(folder, model, partition(model))
        export_folder(tmp_path / "out", source, checkpoint.as_stored(exported(weights.items())))
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert {key: tensor.shape for key, tensor in after.items()} == {key: tensor.shape for key, tensor in before.items()}
    assert_opens_with(tmp_path / "out", weights)


def test_stored_copies_and_buffers_go_back_too(tmp_path: Path) -> None:
    source = tiny_model_folder("qwen3", tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    stored |= {"lm_head.weight": stored["model.embed_tokens.weight"].clone(), "model.correction": torch.ones(3).half()}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    model = build_skeleton(source, compute_dtype=torch.float32)
    model.model.register_buffer("correction", torch.zeros(3))
    weights = trained("qwen3", torch.float32)
    with open_folder(source) as folder:
        checkpoint = match_folder(folder, model, partition(model))
        export_folder(tmp_path / "out", source, checkpoint.as_stored(exported(weights.items())))
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert torch.equal(after["model.correction"], torch.ones(3).half())


def test_a_tensor_larger_than_the_buffer_and_readers_called_in_pieces(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(export, "BUFFER_BYTES", 4096)
    source = tiny_model_folder("gpt2", tmp_path / "source")
    weights = trained("gpt2", torch.float32)
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"].clone()
    with open_folder(source) as folder:
        model = build_skeleton(source, compute_dtype=torch.float32)
        stored = match_folder(folder, model, partition(model)).as_stored(exported(weights.items()))
        export_folder(tmp_path / "out", source, stored)
    assert_opens_with(tmp_path / "out", weights)


@pytest.mark.parametrize("refused_at", ["open", "write"])
def test_where_direct_writing_is_refused_the_same_file_comes_out(refused_at: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(export, "BUFFER_BYTES", 8192)
    source = tiny_model_folder("llama", tmp_path / "source")
    tensors = [("a", torch.randn(5000)), ("b", torch.randn(333, 7).to(torch.bfloat16)), ("c", torch.randn(70_000))]
    export_folder(tmp_path / "direct", source, exported(tensors))
    real_open, real_write, direct = os.open, os.pwrite, set()

    def open_file(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and refused_at == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, flags, *rest)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def write(descriptor: int, data: memoryview, start: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, data[:3000], start)  # and never all of it at once

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "pwrite", write)
    export_folder(tmp_path / "otherwise", source, exported(tensors))
    assert bool(direct) == (refused_at == "write")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("direct", "otherwise")]
    assert files[0] == files[1]
    for name, value in load_file(tmp_path / "direct" / "model.safetensors").items():
        assert torch.equal(value, dict(tensors)[name])


def test_a_dtype_can_be_asked_for(tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    weights = {name: tensor + 1e-4 for name, tensor in trained("llama", torch.float32).items()}
    export_folder(tmp_path / "out", source, exported(weights.items()), dtype=torch.float16)
    assert_opens_with(tmp_path / "out", {name: tensor.half() for name, tensor in weights.items()})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_tells_the_dtype_of_the_weights(key: str, tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config | {key: "float32", "text_config": {"dtype": "float32"}}))
    weights = trained("llama", torch.bfloat16)
    export_folder(tmp_path / "out", source, exported(weights.items()))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {
        key: "bfloat16",
        "text_config": {"dtype": "bfloat16"},
    }


def test_mixed_dtypes_are_written_aligned_and_kept(tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    tensors = {
        "a": torch.ones(3, dtype=torch.bfloat16),
        "b": torch.ones(2),
        "c": torch.tensor(True),
        "d": torch.ones(0),
    }
    export_folder(tmp_path / "out", source, exported(tensors.items()))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_tokenizer_code_and_licence_come_along_and_old_weights_do_not(tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source", shards=2)
    kept = ["tokenizer.json", "tokenizer.model", "special_tokens_map.json", "merges.txt", "chat_template.jinja"]
    kept += ["modeling_own.py", "LICENSE", "preprocessor_config.json", "additional_chat_templates/rag.jinja"]
    dropped = ["pytorch_model.bin", "pytorch_model.bin.index.json", "other.safetensors", ".hidden.json", "data.parquet"]
    (source / "additional_chat_templates").mkdir()
    for name in kept + dropped:
        (source / name).write_text(name)
    export_folder(tmp_path / "out", source, exported(trained("llama", torch.float32).items()))
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {*kept, "config.json", "generation_config.json", "model.safetensors"}
    assert all((tmp_path / "out" / name).read_text() == name for name in kept)


def test_an_empty_target_is_used_and_missing_parents_are_made(tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    weights = trained("llama", torch.float32)
    (tmp_path / "empty").mkdir()
    export_folder(tmp_path / "empty", source, exported(weights.items()))
    export_folder(tmp_path / "a" / "b" / "c", source, exported(weights.items()))
    assert_opens_with(tmp_path / "empty", weights)
    assert_opens_with(tmp_path / "a" / "b" / "c", weights)
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_target_with_something_in_it_is_refused_and_not_touched(tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("out", "file"):
        with pytest.raises(ModelError, match="exists and is not empty"):
            export_folder(tmp_path / name, source, exported([("a", torch.ones(1))]))
    assert (tmp_path / "out" / "mine").read_text() == (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(("names", "message"), [([], "none"), (["a", "a"], "named twice: a")])
def test_nothing_or_the_same_name_twice_is_refused(names: list[str], message: str, tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    with pytest.raises(ModelError, match=message):
        export_folder(tmp_path / "out", source, exported((name, torch.ones(1)) for name in names))


def left_behind(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("error", [RuntimeError("the store is gone"), KeyboardInterrupt()], ids=repr)
def test_a_failing_reader_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")

    def fail(into: memoryview, start_byte: int, num_bytes: int) -> None:
        raise error

    with pytest.raises(type(error)):
        export_folder(tmp_path / "new" / "out", source, [("a", torch.float32, (4,), fail)])
    assert left_behind(tmp_path) == ["source"]


def test_a_drive_too_small_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(ModelError, match=r"needs .* and 1 MB is free there"):
        export_folder(tmp_path / "new" / "out", source, exported([("a", torch.ones(10))]))
    assert left_behind(tmp_path) == ["source"]


@pytest.mark.parametrize("where", ["posix_fallocate", "pwrite", "fsync", "rename"])
def test_a_drive_that_becomes_full_leaves_nothing(where: str, tmp_path: Path, monkeypatch) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, where, full)
    with pytest.raises(ModelError, match="became full while exporting"):
        export_folder(tmp_path / "out", source, exported([("a", torch.ones(10))]))
    monkeypatch.undo()
    assert left_behind(tmp_path) == ["source"]


def test_a_target_that_fills_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    source = tiny_model_folder("llama", tmp_path / "source")

    def meddle(into: memoryview, start_byte: int, num_bytes: int) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("precious")

    with pytest.raises(ModelError, match="cannot be written"):
        export_folder(tmp_path / "out", source, [("a", torch.float32, (4,), meddle)])
    assert left_behind(tmp_path) == ["out", "source"]
    assert (tmp_path / "out" / "mine").read_text() == "precious"
