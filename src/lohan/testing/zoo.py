"""Tiny Hugging Face folders of every architecture we promise, and batches to train them on.

A step of any of them takes milliseconds on one core, yet each keeps what makes its architecture
awkward to stream: tied heads, sliding windows, dropout, fused experts, captured router logits.
Weights are random everywhere (norms and biases too, so that no gradient hides behind a zero) and
exact in bf16, so a folder means the same numbers in any dtype. Everything here is a function of
its arguments: no call reads or moves torch's global random state.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

# Shared by the Llama-shaped ones. The vocabulary is odd, so that head and embedding never end on a
# vector boundary.
_SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_HEADS_OF_16: dict[str, Any] = {"head_dim": 16}
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

_CONFIGS: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {**_SIZES, **_IDS, "num_hidden_layers": 4}),
    "qwen3": (Qwen3Config, {**_SIZES, **_IDS, **_HEADS_OF_16, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {**_SIZES, **_IDS, **_HEADS_OF_16, "sliding_window": 8}),
    "mixtral": (MixtralConfig, {**_SIZES, **_IDS, **_MOE, "sliding_window": None}),
    "mixtral-router": (
        MixtralConfig,
        # A coefficient far above the usual 0.001: a lost router gradient must not look like rounding.
        {**_SIZES, **_IDS, **_MOE, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            **_SIZES,
            **_IDS,
            **_HEADS_OF_16,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": (
        GPT2Config,
        {
            **_IDS,
            "vocab_size": 257,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
        },
    ),
    "opt": (
        OPTConfig,
        {
            **_IDS,
            "vocab_size": 257,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "dropout": 0.1,
            "attention_dropout": 0.1,
        },
    ),
    "gpt_neox": (
        GPTNeoXConfig,
        {**{k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}, **_IDS, "tie_word_embeddings": False},
    ),
    "phi3": (Phi3Config, {**_SIZES, **_IDS, "original_max_position_embeddings": 128}),
    "gpt_oss": (
        GptOssConfig,
        {
            **_SIZES,
            **_IDS,
            **_HEADS_OF_16,
            **_MOE,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}

NAMES: tuple[str, ...] = tuple(_CONFIGS)
"""Every architecture of the parity promise, in the order it is usually written."""


def tiny_config(name: str, *, tied: bool | None = None, **overrides: Any) -> PreTrainedConfig:
    """The configuration of one zoo model. `tied` forces a tied or a separate head; None keeps the usual one."""
    if name not in _CONFIGS:
        raise ValueError(f"No zoo model is named {name!r}. Choose one of: {', '.join(NAMES)}.")
    make, settings = _CONFIGS[name]
    if tied is not None:
        overrides["tie_word_embeddings"] = tied
    return make(**{**settings, **overrides})


def tiny_model(name: str, *, seed: int = 0, tied: bool | None = None, **overrides: Any) -> Any:
    """One zoo model in RAM, in float32, its weights random and exact in bf16."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(name, tied=tied, **overrides), dtype=torch.float32)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=source)
            parameter.copy_((parameter + 0.05 * noise).to(torch.bfloat16))
    return model


def tiny_model_folder(
    name: str,
    directory: Path | str,
    seed: int = 0,
    tied: bool | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write one zoo model as Hugging Face would: config.json and model.safetensors, or `shards` files and an index.

    The tensor names in the files are those of the Hub. For some architectures (Mixtral's experts)
    they are not the names of the module's parameters.
    """
    folder = Path(directory)
    tiny_model(name, seed=seed, tied=tied, **overrides).to(dtype).save_pretrained(folder)
    if shards > 1:
        _split_file(folder, shards)
    return folder


def random_batches(
    vocab: int,
    *,
    num_micro_batches: int,
    batch: int,
    seq: int,
    seed: int,
    step: int = 1,
    ragged: bool = False,
) -> list[dict[str, Tensor]]:
    """The micro-batches of one step: random tokens, some without a label, neighbours with unlike numbers of labels.

    A loss averaged where it should be summed therefore gives other bits, and so does one that counts
    the first token of a row, which has a label in the first micro-batch and predicts nothing. With
    `ragged` every row also has its own length, padded on the left in even rows and on the right in
    odd ones.
    """
    if seq < 4:
        raise ValueError(f"seq is {seq}; the label pattern needs at least 4 tokens per row.")
    source = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    batches: list[dict[str, Tensor]] = []
    previous = -1
    for index in range(num_micro_batches):
        input_ids = torch.randint(3, vocab, (batch, seq), generator=source)
        attention_mask = torch.ones(batch, seq, dtype=torch.int64)
        if ragged:
            padding = torch.randint(1, seq // 2, (batch,), generator=source)
            for row, pad in enumerate(padding.tolist()):
                where = slice(0, pad) if row % 2 == 0 else slice(seq - pad, seq)
                input_ids[row, where] = 0
                attention_mask[row, where] = 0
        without = torch.rand(batch, seq, generator=source) < 0.05 * (1 + index % 3)
        without[:, 0] = False
        without[:, : index % (seq // 2)] = True  # a prompt, longer in each micro-batch
        labels = input_ids.masked_fill(without | (attention_mask == 0), -100)
        for row in range(batch):  # at least one label in every row, on its last token
            last = int(attention_mask[row].nonzero().max())
            labels[row, last] = input_ids[row, last]
        if int((labels[:, 1:] != -100).sum()) == previous:
            row, column = (labels[:, 1:] != -100).nonzero()[0].tolist()
            labels[row, column + 1] = -100
        previous = int((labels[:, 1:] != -100).sum())
        batches.append({"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels})
    return batches


def _split_file(folder: Path, shards: int) -> None:
    """Replace model.safetensors by `shards` files of consecutive tensors and their index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    names = list(tensors)
    if shards > len(names):
        raise ValueError(f"shards is {shards} and the model has {len(names)} tensors. Use at most {len(names)}.")
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        own = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in own}, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(own, file_name))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    whole.unlink()
