from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lohan.errors import ModelError
from lohan.models.skeleton import build_skeleton, parameters_on_meta
from lohan.testing.zoo import NAMES, tiny_model_folder

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_skeleton_is_the_loaded_model_without_its_weights(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_model_folder(name, tmp_path / "model")
    skeleton = build_skeleton(folder, compute_dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert described(skeleton.named_parameters(remove_duplicate=False)) == described(
        loaded.named_parameters(remove_duplicate=False)
    )
    buffers, expected = dict(skeleton.named_buffers()), dict(loaded.named_buffers())
    assert described(buffers.items()) == described(expected.items())
    assert all(torch.equal(buffers[key], expected[key]) for key in expected)


def described(tensors) -> dict[str, object]:
    return {name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors}


def test_a_skeleton_is_ready_to_train(tmp_path: Path) -> None:
    skeleton = build_skeleton(tiny_model_folder("gpt2", tmp_path), compute_dtype=torch.float32)
    assert skeleton.training
    assert skeleton.config.use_cache is False
    assert {module.p for module in skeleton.modules() if isinstance(module, nn.Dropout)} == {0.1}


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    skeleton = build_skeleton(tiny_model_folder("qwen3", tmp_path), compute_dtype=torch.bfloat16)
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight


def test_the_attention_implementation_can_be_chosen(tmp_path: Path) -> None:
    folder = tiny_model_folder("llama", tmp_path)
    assert (
        build_skeleton(folder, compute_dtype=torch.float32, attn_implementation="eager").config._attn_implementation
        == "eager"
    )
    with pytest.raises(ModelError, match="attn_implementation='no_such'"):
        build_skeleton(folder, compute_dtype=torch.float32, attn_implementation="no_such")


def test_the_random_state_is_left_alone(tmp_path: Path) -> None:
    folder = tiny_model_folder("gpt_oss", tmp_path)
    before = torch.get_rng_state()
    build_skeleton(folder, compute_dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_thread_may_build_a_real_module_meanwhile() -> None:
    built: list[nn.Module] = []
    with parameters_on_meta():
        other = threading.Thread(target=lambda: built.append(nn.Linear(2, 3)))
        other.start()
        other.join()
        own = nn.Linear(2, 3)
    assert own.weight.is_meta
    assert not built[0].weight.is_meta
    assert not nn.Linear(2, 3).weight.is_meta


def test_memory_does_not_depend_on_the_size_of_the_model(tmp_path: Path) -> None:
    tiny_model_folder("gpt_oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 12, "num_local_experts": 32}
    config |= {"vocab_size": 200_000, "num_attention_heads": 64, "head_dim": 64, "num_key_value_heads": 8}
    config["layer_types"] = ["full_attention"] * 12
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = f"""
import torch
peak_kib = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # ru_maxrss has the parent's
from pathlib import Path
from lohan.models.skeleton import build_skeleton
from lohan.models.units import partition
from transformers import GptOssForCausalLM
import torch._subclasses
start = peak_kib()
model = build_skeleton(Path({str(tmp_path)!r}), compute_dtype=torch.float32)
units = partition(model)
print(sum(p.numel() for p in model.parameters()), peak_kib() - start)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    num_parameters, grown_kib = map(int, done.stdout.split()[-2:])
    assert num_parameters > 10e9
    assert grown_kib < 200 * 1024


def test_a_buffer_too_large_to_build_is_refused_by_name(tmp_path: Path) -> None:
    from lohan.models.skeleton import _refuse_lost_buffers

    with parameters_on_meta():
        model = nn.Module()
        model.register_buffer("mask", torch.ones(5000, 5000).tril(), persistent=False)
        model.register_buffer("loaded", torch.ones(5000, 5000), persistent=True)
        model.register_buffer("small", torch.ones(500, 500), persistent=False)
    assert not model.small.is_meta
    with pytest.raises(ModelError, match=r": mask\.\n"):
        _refuse_lost_buffers(model, tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        build_skeleton(tmp_path, compute_dtype=torch.float32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read: Expecting property name"),
        ('{"model_type": "no_such_type"}', "does not know"),
        ('{"model_type": "vit"}', "cannot be built as a causal language model"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}', r"quantized weights \(mxfp4\)"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        build_skeleton(tmp_path, compute_dtype=torch.float32)
