"""Whether a model keeps the examples of a packed row apart, found out by asking it.

transformers makes a block mask from position_ids that begin again at 0, if the model's code hands them to the function
that makes masks. Some do not (OPT and gpt-oss in 5.22), and models with recurrent or convolutional layers cannot: their
examples would see each other without an error. So a small model with the same code and random weights is built and
must give each example of a packed row the logits it gives it alone. If position_ids are not enough, an explicit mask is
tried. All this holds with use_cache off, as it is while a run is open: with a cache, transformers does not look at
position_ids.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lohan.errors import ConfigError
from lohan.train.data.batches import causal_blocks

_LENGTHS = (11, 17, 6)
"""Of the examples that are packed: longer than the small model's windows, so that those must be right too."""

_WINDOW = 4
_TOLERANCE = 1e-3
"""Of logits about 1 in size, computed in another order; examples that see each other are off by more than 0.1."""

Packing = Literal["position_ids", "block_mask"]


def check_packing(folder: str | Path, *, trust_remote_code: bool = False) -> Packing:
    """What a packed batch must carry for the model in this folder. ConfigError if nothing keeps its examples apart."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # anything a broken folder can do to a parser
        raise ConfigError(f"{folder}: its config.json cannot be read: {_first_line(error)}") from None
    return packing_of(config, trust_remote_code=trust_remote_code)


def packing_of(config: Any, *, trust_remote_code: bool = False) -> Packing:
    """The same for a configuration."""
    refused = f"packing: true cannot be used with this model ({config.model_type}): "
    try:
        model = _small_model(config, trust_remote_code)
        if _keeps_apart(model, with_mask=False):
            return "position_ids"
    except Exception as error:  # a model of any make, at sizes it was not made for
        raise ConfigError(
            f"{refused}a small copy of it, to check that packed examples do not see each other, fails with "
            f"{type(error).__name__}: {_first_line(error)}. Set packing: false."
        ) from None
    try:
        if _keeps_apart(model, with_mask=True):
            return "block_mask"
    except Exception:  # it takes no such mask
        pass
    raise ConfigError(f"{refused}its layers let the examples of a row see each other. Set packing: false.")


def _keeps_apart(model: Any, *, with_mask: bool) -> bool:
    source = torch.Generator().manual_seed(0)
    examples = [torch.randint(3, 60, (1, length), generator=source) for length in _LENGTHS]
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    inputs: dict[str, Tensor] = {"input_ids": torch.cat(examples, 1), "position_ids": positions}
    if with_mask:
        inputs["attention_mask"] = causal_blocks(positions)
    with torch.no_grad():
        packed = model(**inputs, use_cache=False).logits
        alone = torch.cat([model(input_ids=example, use_cache=False).logits for example in examples], 1)
    scale = float(alone.abs().max())
    return bool(scale > 0) and bool((packed - alone).abs().max() <= _TOLERANCE * scale)


def _small_model(config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    for part in {id(each): each for each in (small, small.get_text_config())}.values():
        _shrink(part)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, trust_remote_code=trust_remote_code)
        # Fresh weights are so small that a model is nearly its embedding, and what should differ would not show.
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def _shrink(config: Any) -> None:
    """Small enough to run in a moment, with every kind of layer left in it. Sizes of heads stay, positions too."""

    def get(*names: str) -> int | None:
        return next((getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)), None)

    def limit(most: int, *names: str) -> None:
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > most:
                setattr(config, name, most)

    heads = get("num_attention_heads", "n_head", "num_heads") or 1
    hidden = get("hidden_size", "n_embd", "d_model") or 64
    head_size = get("head_dim") or max(hidden // heads, 1)
    kv_heads = get("num_key_value_heads")
    kept = 2 if kv_heads is None or kv_heads < heads else heads
    kept = min(kept, heads, 2)
    limit(kept, "num_attention_heads", "n_head", "num_heads")
    limit(kept if kv_heads == heads else 1, "num_key_value_heads")
    limit(kept * head_size, "hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
    limit(2 * kept * head_size, "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "ffn_hidden_size")
    limit(64, "vocab_size", "vocab_size_per_layer_input")
    limit(4, "num_local_experts", "num_experts", "n_routed_experts")
    limit(2, "num_experts_per_tok", "moe_topk", "top_k")
    limit(1, "n_group", "topk_group")
    limit(_WINDOW, "sliding_window", "attention_chunk_size")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    kinds = getattr(config, "layer_types", None)
    layers = _one_of_each(list(kinds)) if kinds else None
    num = max(2, len(layers)) if layers else 4
    limit(num, "num_hidden_layers", "n_layer", "num_layers")
    if layers:
        config.layer_types = (layers * 2)[:num]


def _one_of_each(kinds: list[str]) -> list[str]:
    return list(dict.fromkeys(kinds))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
