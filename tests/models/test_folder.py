"""Folders in: every architecture loads to the bit, and everything wrong with a folder is told at once."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lohan.errors import ModelError
from lohan.models.checkpoint import Checkpoint, Stored, match_folder, read_elements
from lohan.models.folder import LENT_BYTES, Folder, open_folder
from lohan.models.layout import Run
from lohan.models.skeleton import build_skeleton
from lohan.models.tensor_file import read_entries
from lohan.models.units import partition
from lohan.testing.zoo import NAMES, tiny_model, tiny_model_folder


def match(folder: Path) -> Checkpoint:
    model = build_skeleton(folder, compute_dtype=torch.float32)
    return match_folder(open_folder(folder), model, partition(model))


def loaded(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every parameter, read in uneven pieces."""
    found = {}
    for name, stored in checkpoint.params.items():
        values = torch.full((stored.num_elements,), float("nan"))
        for start in range(0, len(values), 1001):
            checkpoint.read(name, start, values[start : start + 1001])
        found[name] = values.view(stored.shape)
    return found


def assert_loads_like_transformers(folder: Path) -> None:
    actual = loaded(match(folder))
    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert actual.keys() == expected.keys()
    for name, values in actual.items():
        assert torch.equal(values.view(torch.int32), expected[name].detach().view(torch.int32)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_loads_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    shards = 3 if dtype == torch.bfloat16 else 1
    assert_loads_like_transformers(tiny_model_folder(name, tmp_path, dtype=dtype, shards=shards))


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "gpt_oss"])
def test_the_layout_of_the_module_loads_too(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path, save_original_format=False)
    assert_loads_like_transformers(tmp_path)


def test_more_than_ten_experts_are_stacked_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    tiny_model_folder("mixtral", tmp_path, num_local_experts=12)
    assert_loads_like_transformers(tmp_path)


def test_experts_of_qwen_are_stacked(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=16, intermediate_size=20, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=5, num_experts_per_tok=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in stored
    assert_loads_like_transformers(tmp_path)


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("llama", "model."), ("mixtral", "model.")])
def test_a_checkpoint_without_the_prefix_of_the_base_model_loads(name: str, prefix: str, tmp_path: Path) -> None:
    """The published GPT-2 is one."""
    rewrite(tiny_model_folder(name, tmp_path), lambda tensors: {k.removeprefix(prefix): v for k, v in tensors.items()})
    assert_loads_like_transformers(tmp_path)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_a_tied_weight_may_be_stored_under_either_name_or_both(kept: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight = tensors.pop("model.embed_tokens.weight")
        names = ["model.embed_tokens.weight", "lm_head.weight"] if kept == "both" else [kept]
        return tensors | {name: weight.clone() for name in names}

    rewrite(tiny_model_folder("qwen3", tmp_path), change)
    assert_loads_like_transformers(tmp_path)


def test_tables_that_old_checkpoints_stored_are_forgiven(tmp_path: Path) -> None:
    rewrite(tiny_model_folder("gpt2", tmp_path / "a"), lambda t: t | {"transformer.h.0.attn.bias": torch.ones(4)})
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(tiny_model_folder("llama", tmp_path / "b"), lambda tensors: tensors | old)
    match(tmp_path / "a")
    match(tmp_path / "b")


def test_mixed_dtypes_load_exactly(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        return {name: tensor.to(dtypes[i % 3]) for i, (name, tensor) in enumerate(tensors.items())}

    rewrite(tiny_model_folder("mixtral", tmp_path), change)
    assert_loads_like_transformers(tmp_path)


def test_special_values_survive(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 65504.0]).repeat(257 * 64)[: 257 * 64]
    rewrite(
        tiny_model_folder("llama", tmp_path),
        lambda tensors: tensors | {"lm_head.weight": odd.view(257, 64).to(torch.bfloat16)},
    )
    values = loaded(match(tmp_path))["lm_head.weight"]
    assert torch.equal(values.view(torch.int32), odd.view(257, 64).to(torch.bfloat16).float().view(torch.int32))


def test_persistent_buffers_get_their_stored_values(tmp_path: Path) -> None:
    folder = tiny_model_folder("llama", tmp_path)
    model = build_skeleton(folder, compute_dtype=torch.float32)
    model.model.register_buffer("correction", torch.empty(3, device="meta"))
    rewrite(folder, lambda tensors: tensors | {"model.correction": torch.tensor([1.0, 2.0, 3.0]).bfloat16()})
    checkpoint = match_folder(open_folder(folder), model, partition(model))
    checkpoint.load_buffers(model)
    assert torch.equal(model.model.correction, torch.tensor([1.0, 2.0, 3.0]))


def rewrite(folder: Path, change) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, *lines: str) -> str:
    with pytest.raises(ModelError) as caught:
        match(folder)
    for line in lines:
        assert line in str(caught.value), str(caught.value)
    return str(caught.value)


def test_everything_wrong_is_told_in_one_error(tmp_path: Path) -> None:
    folder = tiny_model_folder("llama", tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["lm_head.weight"] = torch.zeros(257, 60)
        tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(64, dtype=torch.int32)
        return tensors | {"model.layers.0.extra": torch.zeros(2), "optimizer": torch.zeros(1)}

    rewrite(folder, change)
    message = refused(
        folder,
        "does not fit the LlamaForCausalLM its config.json describes (6 problems):",
        "missing: model.norm.weight [64]",
        "missing: model.layers.1.mlp.up_proj.weight [96, 64]",
        "wrong shape: lm_head.weight has [257, 60] and the model needs [257, 64]",
        "unexpected: model.layers.0.extra [2]",
        "unexpected: optimizer [1]",
        "dtype: model.layers.0.input_layernorm.weight is int32",
    )
    assert message.count("missing:") == 2
    assert len(message.splitlines()) == 8


def test_a_missing_or_misshapen_expert_is_named(tmp_path: Path) -> None:
    folder = tiny_model_folder("mixtral", tmp_path)
    moe = "model.layers.0.block_sparse_moe.experts"

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors[f"{moe}.3.w2.weight"]
        return tensors | {f"{moe}.1.w1.weight": torch.zeros(90, 64)}

    rewrite(folder, change)
    refused(
        folder,
        "wrong shape: model.layers.0.mlp.experts.down_proj has [3, 64, 96] and the model needs [4, 64, 96]",
        f"layout: model.layers.0.mlp.experts.gate_up_proj is made of {moe}.0.w1.weight and 7 more: its parts have "
        f"unlike shapes",
    )


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    rewrite(
        tiny_model_folder("qwen3", tmp_path),
        lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
    )
    refused(tmp_path, "differ: lm_head.weight and model.embed_tokens.weight", "set tie_word_embeddings to false")


def test_long_lists_are_cut(tmp_path: Path) -> None:
    extra = {f"extra.{i}": torch.zeros(1) for i in range(100)}
    rewrite(tiny_model_folder("llama", tmp_path), lambda tensors: tensors | extra)
    assert refused(tmp_path, "(100 problems)", "... and 60 more of this kind").count("unexpected") == 40


def test_a_truncated_file_names_what_is_lost(tmp_path: Path) -> None:
    file = tiny_model_folder("llama", tmp_path) / "model.safetensors"
    last = max(read_entries(file)[0].values(), key=lambda entry: entry.offset)
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 1)
    refused(tmp_path, f"truncated: {last.name} in model.safetensors", "(1 problem)")


def test_a_folder_that_lost_shards_says_which(tmp_path: Path) -> None:
    folder = tiny_model_folder("llama", tmp_path, shards=4)
    (folder / "model-00002-of-00004.safetensors").unlink()
    (folder / "model-00003-of-00004.safetensors").write_bytes(b"abc")
    refused(
        folder,
        "missing file: model-00002-of-00004.safetensors",
        "bad file: model-00003-of-00004.safetensors: truncated: 3 bytes",
    )


def test_a_tensor_in_two_shards_is_a_duplicate(tmp_path: Path) -> None:
    folder = tiny_model_folder("llama", tmp_path, shards=2)
    first = load_file(folder / "model-00001-of-00002.safetensors")
    second = load_file(folder / "model-00002-of-00002.safetensors")
    name = next(iter(first))
    save_file(second | {name: first[name]}, folder / "model-00002-of-00002.safetensors")
    refused(folder, f"duplicate: {name} is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors")


def test_a_tensor_stored_under_two_names_is_a_duplicate(tmp_path: Path) -> None:
    rewrite(tiny_model_folder("llama", tmp_path), lambda tensors: tensors | {"norm.weight": torch.zeros(64)})
    refused(tmp_path, "duplicate:", "are both model.norm.weight")


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "..", "a/b.safetensors", "a\\b", ""])
def test_an_index_cannot_point_outside_the_folder(name: str, tmp_path: Path) -> None:
    folder = tiny_model_folder("llama", tmp_path / "model", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, f"outside the folder: model.safetensors.index.json names {name!r}")


def test_an_index_that_lies_about_a_tensor_is_told(tmp_path: Path) -> None:
    folder = tiny_model_folder("llama", tmp_path, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "missing: ghost is not in model-00001-of-00002.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}'])
def test_an_unreadable_index_is_refused(text: str, tmp_path: Path) -> None:
    folder = tiny_model_folder("llama", tmp_path, shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        ([], "Download the weights"),
        (["pytorch_model.bin"], "pickled weights"),
        (["adapter_model.safetensors"], "PEFT adapter"),
        (["weights.safetensors"], "other names"),
    ],
)
def test_a_folder_without_weights_says_what_to_do(files: list[str], advice: str, tmp_path: Path) -> None:
    for name in ["config.json", *files]:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=advice):
        open_folder(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        open_folder(tmp_path / "nowhere")


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": ONE, "b": ONE}, 8, "b begins at byte"),
        ({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, 12, "b begins at byte"),
        ({"a": {**ONE, "data_offsets": [4, 12]}}, 12, "a begins at byte"),
        ({"a": ONE, "b": {**ONE, "data_offsets": [16, 24]}}, 24, "b begins at byte"),
        ({"a": {**ONE, "data_offsets": [0, 4]}}, 4, "needs 8 bytes and is given 4"),
        ({"a": {**ONE, "data_offsets": [8, 0]}}, 8, "needs 8 bytes and is given -8"),
        ({"a": {**ONE, "shape": [-2]}}, 8, r"a has shape \[-2\]"),
        ({"a": {**ONE, "shape": [1.5]}}, 8, r"a has shape \[1\.5\]"),
        ({"a": {**ONE, "shape": [True]}}, 8, r"a has shape \[True\]"),
        ({"a": {**ONE, "shape": [2**64]}}, 8, "a has shape"),
        ({"a": {**ONE, "shape": [1] * 100}}, 8, "a has shape"),
        ({"a": {**ONE, "shape": None}}, 8, "a has shape None"),
        ({"a": {**ONE, "data_offsets": [0]}}, 8, "data_offsets"),
        ({"a": {**ONE, "dtype": "F7"}}, 8, "dtype 'F7', which is not known"),
        ({"a": []}, 8, "is not an object"),
        ([], 8, "not a JSON object"),
        ({"a": ONE}, 9, "its tensors end at byte"),
    ],
)
def test_a_damaged_header_is_refused(header: object, data: int, message: str, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    with pytest.raises(ModelError, match=message):
        read_entries(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short for a header"),
        (struct.pack("<Q", 2**40), "its header claims 1,099,511,627,776 bytes"),
        (struct.pack("<Q", 50) + b"{}", "truncated: 10 bytes, and its header alone needs 58"),
        (struct.pack("<Q", 2) + b"{]", "not JSON"),
        (struct.pack("<Q", 1) + b"\xff", "not JSON"),
        (struct.pack("<Q", 6000) + b"[" * 6000, "not JSON"),
        (struct.pack("<Q", 5000) + b"1" * 5000, "not JSON"),
        (struct.pack("<Q", 17) + b'{"a":{}, "a": {}}', "named twice: a"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_entries(file)


def test_a_tensor_is_read_in_parts_into_memory_of_the_caller(tmp_path: Path) -> None:
    save_file({"a": torch.arange(10.0), "empty": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with open_folder(tmp_path) as folder:
        whole, part = np.zeros(10, np.float32), bytearray(8)
        folder.read(folder.tensors["a"], whole)
        folder.read(folder.tensors["a"], memoryview(part), 12, 8)
        folder.read(folder.tensors["empty"], bytearray())
        assert whole.tolist() == list(range(10))
        assert np.frombuffer(part, np.float32).tolist() == [3.0, 4.0]
        with pytest.raises(ValueError, match="40 bytes"):
            folder.read(folder.tensors["a"], bytearray(8), 36, 8)
    with pytest.raises(ValueError, match="is closed"):
        folder.read(folder.tensors["a"], whole)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_cut_short_after_it_was_opened_is_noticed(tmp_path: Path, direct: bool) -> None:
    save_file({"a": torch.arange(10.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    folder = open_folder(tmp_path, direct=direct)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 4)
    with pytest.raises(ModelError, match="ends inside a"):
        folder.read(folder.tensors["a"], bytearray(40))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Folder, bytes]]:
    """A tensor larger than what is lent at once, at an odd place of its file, and its bytes."""
    path = tmp_path_factory.mktemp("large")
    values = np.random.default_rng(0).integers(0, 256, LENT_BYTES + 70_001, dtype=np.uint8)
    save_file({"a": torch.zeros(1001, dtype=torch.uint8), "b": torch.from_numpy(values)}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    with open_folder(path) as folder:
        yield folder, values.tobytes()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("calls", ["real", "short", "refused", "never open"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_stretch_is_read_whatever_the_file_system_makes_of_it(
    large: tuple[Folder, bytes], calls: str, direct: bool, data: st.DataObject
) -> None:
    """Direct I/O that gives less than was asked for, that refuses, and files that do not open for it."""
    given_folder, expected = large
    start = data.draw(st.integers(0, len(expected)))
    count = data.draw(st.integers(0, len(expected) - start) | st.integers(0, min(9000, len(expected) - start)))
    most = data.draw(st.integers(4096, 1 << 21))
    opened, preadv, directly, tried = os.open, os.preadv, set(), False

    def open_file(path: Path, flags: int) -> int:
        nonlocal tried
        tried |= bool(flags & os.O_DIRECT)
        if calls == "never open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        descriptor = opened(path, flags)
        if flags & os.O_DIRECT:
            directly.add(descriptor)
        return descriptor

    def read_some(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if calls == "refused" and descriptor in directly:
            raise OSError(errno.EINVAL, "other rules")
        if calls == "short":
            return preadv(descriptor, [buffers[0][: most // 512 * 512]], offset)
        return preadv(descriptor, buffers, offset)

    with pytest.MonkeyPatch.context() as patch, open_folder(given_folder.path, direct=direct) as folder:
        patch.setattr(os, "open", open_file)
        patch.setattr(os, "preadv", read_some)
        into = bytearray(count)
        folder.read(folder.tensors["b"], into, start, count)
    assert into == expected[start : start + count]
    assert tried == (direct and count > 0)


def test_a_file_system_that_refuses_is_asked_once(large: tuple[Folder, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    given_folder, expected = large
    opened, preadv, directly, refused = os.open, os.preadv, set(), 0

    def open_file(path: Path, flags: int) -> int:
        descriptor = opened(path, flags & ~os.O_DIRECT)
        if flags & os.O_DIRECT:
            directly.add(descriptor)
        return descriptor

    def read_some(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal refused
        if descriptor in directly:
            refused += 1
            raise OSError(errno.EINVAL, "other rules")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", read_some)
    with open_folder(given_folder.path, direct=True) as folder:
        for start in (0, 5000, 70_000):
            assert bytes(folder.lend(folder.tensors["b"], start, 9000)) == expected[start : start + 9000]
    assert refused == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spaces", range(4))
def test_elements_may_begin_at_any_byte_of_the_file(tmp_path: Path, spaces: int, dtype: torch.dtype) -> None:
    values = torch.randn(3000).to(dtype)
    name = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    entry = {"dtype": name, "shape": [3000], "data_offsets": [0, values.nbytes]}
    header = json.dumps({"a": entry}).encode() + b" " * spaces
    content = struct.pack("<Q", len(header)) + header + values.view(torch.uint8).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    with open_folder(tmp_path) as folder:
        stored = Stored("a", (3000,), (Run(folder.tensors["a"], 0, 0, 3000),))
        found = torch.empty(1801)
        read_elements(folder, stored, found, 999)
    assert torch.equal(found, values[999:2800].float())


def test_what_is_lent_has_a_limit(large: tuple[Folder, bytes]) -> None:
    folder, expected = large
    assert bytes(folder.lend(folder.tensors["b"], 3, LENT_BYTES)) == expected[3 : 3 + LENT_BYTES]
    for start, count in ((0, LENT_BYTES + 1), (-1, 4), (len(expected), 1)):
        with pytest.raises(ValueError, match="are not lent"):
            folder.lend(folder.tensors["b"], start, count)


def test_memory_of_loading_and_exporting_does_not_depend_on_the_size_of_the_model(tmp_path: Path) -> None:
    folder = tiny_model_folder("llama", tmp_path / "model", vocab_size=400_000, dtype=torch.bfloat16)
    script = f"""
import torch
peak_kib = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # ru_maxrss has the parent's
from pathlib import Path
from lohan.models.checkpoint import match_folder
from lohan.models.export import ExportTensor, export_folder
from lohan.models.folder import open_folder
from lohan.models.skeleton import build_skeleton
from lohan.models.units import partition
source = Path({str(folder)!r})
model = build_skeleton(source, compute_dtype=torch.float32)
units = partition(model)
start = peak_kib()
with open_folder(source) as folder:
    checkpoint = match_folder(folder, model, units)
    def reader(name):
        return lambda into, start, count: checkpoint.read(name, start // 4, torch.frombuffer(into, dtype=torch.float32))
    tensors = [ExportTensor(p.name, torch.float32, p.shape, reader(p.name)) for p in units.params]
    export_folder(Path({str(tmp_path / "out")!r}), source, checkpoint.as_stored(tensors))
print(sum(p.num_elements for p in units.params) * 4, peak_kib() - start)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    num_bytes, grown_kib = map(int, done.stdout.split()[-2:])
    assert num_bytes > 200e6
    assert grown_kib < 100 * 1024  # three threads, each with buffers of its own
