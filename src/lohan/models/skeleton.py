"""A Hugging Face model without its weights: parameters on the meta device, buffers with their real values.

build_skeleton() reads config.json and nothing else of the folder, and its memory does not depend on the size of
the model. Buffers (rotary tables, embedding scales) are computed by the model's own constructor, in the dtype
from_pretrained would give them; only persistent buffers may still be on meta afterwards, since their values come
from the checkpoint. The random state of the process is left as it was.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from lohan.errors import ModelError

_LARGE_ELEMENTS = 1 << 24
"""Factories above this go to meta at once. No rotary table comes near it; a parameter does, and would be real
for the moment between its creation and its registration."""

_SIZED_FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye}
)


def build_skeleton(
    folder: Path,
    *,
    compute_dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The model that config.json describes, in training mode, with use_cache off and every parameter on meta.

    Parameters get compute_dtype, except those the architecture insists on keeping in fp32.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(folder, trust_remote_code=trust_remote_code)
    with torch.random.fork_rng(devices=[]), parameters_on_meta():
        try:
            for part in (config, config.get_text_config()):
                part.use_cache = False
                part.output_hidden_states = False
            model: nn.Module = AutoModelForCausalLM.from_config(
                config,
                dtype=compute_dtype,
                trust_remote_code=trust_remote_code,
                **({} if attn_implementation is None else {"attn_implementation": attn_implementation}),
            )
        except Exception as error:  # constructors fail in many ways on a config that makes no sense
            raise ModelError(
                f"{folder} cannot be built as a causal language model (model_type {config.model_type!r}): "
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}\n"
                f"lohan trains what AutoModelForCausalLM.from_config accepts; check config.json"
                + ("." if attn_implementation is None else f" and attn_implementation={attn_implementation!r}.")
            ) from error
    _move_parameters_to_meta(model, _fp32_patterns(model, compute_dtype))
    _refuse_lost_buffers(model, folder)
    model.train()
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside, by this thread, have their parameters on meta the moment they are registered."""
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # The hook is process-wide; another thread may be building a real module right now.
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        return _meta_like(parameter, parameter.dtype)

    # torch types the return of the hook as None, but documents and uses it as the replacement.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with _LargeFactoriesOnMeta():
            yield
    finally:
        hook.remove()


class _LargeFactoriesOnMeta(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if (
            func in _SIZED_FACTORIES
            and options.get("device") is None
            and _num_elements(func, args, options) > _LARGE_ELEMENTS
        ):
            options["device"] = torch.device("meta")
        return func(*args, **options)


def _num_elements(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> int:
    if func is torch.eye:
        numbers = [size for size in (*args, options.get("n"), options.get("m")) if isinstance(size, int)]
        return numbers[0] * numbers[-1] if numbers else 0
    size = args[0] if args else options.get("size", ())
    if isinstance(size, int):
        size = [size] if func is torch.full else [number for number in args if isinstance(number, int)]
    return prod(size) if isinstance(size, (tuple, list)) else 0


def read_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The folder's config. ModelError with what to do for all that transformers cannot make a model of."""
    from transformers import AutoConfig

    _look_at_config(folder, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # each config class checks its values in its own way
        why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ModelError(
            f"{folder / 'config.json'} cannot be read as a model config: {why}. Download it again, or correct it."
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        method = getattr(config.quantization_config, "quant_method", None)
        if method is None and isinstance(config.quantization_config, dict):
            method = config.quantization_config.get("quant_method", "unknown")
        raise ModelError(
            f"{folder} holds quantized weights ({method}), and all parameters are trained in full precision here.\n"
            f"Load it once with transformers, dequantized (MXFP4: quantization_config=Mxfp4Config(dequantize=True)), "
            f"save it with save_pretrained, and use that folder."
        )
    return config


def _look_at_config(folder: Path, trust_remote_code: bool) -> None:
    """What can be told without transformers, in words that help."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder. Set model_name_or_path to a local Hugging Face folder; "
            "a model of the Hub must be downloaded first: hf download NAME --local-dir FOLDER."
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder.\n"
            f"Give the folder that holds config.json and the *.safetensors files."
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Download it again.") from None
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{file} does not describe a model: it is not a JSON object with entries. Download it again.")
    kind = found.get("model_type")
    if kind in CONFIG_MAPPING or trust_remote_code:
        return
    if found.get("auto_map"):
        raise ModelError(
            f"{folder} needs Python code that comes with it. Read its *.py files, and if you trust them set "
            "trust_remote_code: true."
        )
    if kind is None:
        raise ModelError(f"{file} names no model_type. Download it again.")
    import transformers

    raise ModelError(
        f"{file} has the model_type {kind!r}, which transformers {transformers.__version__} does not know. Correct it, "
        "or install a newer transformers: pip install -U transformers."
    )


def _fp32_patterns(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """What from_pretrained keeps in fp32 when asked for this dtype (transformers' _get_dtype_plan)."""
    patterns: set[str] = set()
    if dtype == torch.float16:
        patterns.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        patterns.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return [pattern.replace("*", ".*") for pattern in sorted(patterns)]


def _move_parameters_to_meta(model: nn.Module, fp32_patterns: list[str]) -> None:
    replaced: dict[int, nn.Parameter] = {}
    kept: list[nn.Parameter] = []  # ids in `replaced` stay unique only while these live
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full_name = f"{path}.{name}" if path else name
            keep_fp32 = any(re.search(pattern, full_name) for pattern in fp32_patterns)
            dtype = torch.float32 if keep_fp32 and parameter.is_floating_point() else parameter.dtype
            if id(parameter) not in replaced:
                kept.append(parameter)
                replaced[id(parameter)] = _meta_like(parameter, dtype)
            module._parameters[name] = replaced[id(parameter)]


def _meta_like(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    empty = torch.empty(parameter.shape, dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _refuse_lost_buffers(model: nn.Module, folder: Path) -> None:
    persistent = set(model.state_dict(keep_vars=True))
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in persistent]
    if lost:
        raise ModelError(
            f"{folder}: the model makes {'these buffers' if len(lost) > 1 else 'this buffer'} too large to build "
            f"without its weights (more than {_LARGE_ELEMENTS:,} elements): {', '.join(lost)}.\n"
            f"The checkpoint does not hold {'them' if len(lost) > 1 else 'it'} either. A smaller "
            f"max_position_embeddings in config.json makes such tables smaller."
        )
