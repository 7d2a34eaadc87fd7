"""From a place and a prompt to text: opens the model without its weights, and lets it write token by token.

What decides the next token is transformers' own generate() with the model's generation settings. Without sampling the
text is the one `model.generate` gives for the same folder opened in RAM with the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lohan.engine.export import run_directories
from lohan.engine.run_folder import read_run_folder, wire_dtype
from lohan.engine.settings import Settings, dtype_of
from lohan.errors import ConfigError, ModelError, StoreLocked
from lohan.generate.live_text import LiveText
from lohan.generate.streamed import StreamedModel
from lohan.generate.weights import FolderWeights, StoreWeights, Weights
from lohan.models.checkpoint import match_folder
from lohan.models.folder import open_folder
from lohan.models.skeleton import build_skeleton
from lohan.models.units import Units, partition
from lohan.optim import Updater
from lohan.sizes import parse_size
from lohan.store import open_store
from lohan.store.report import held
from lohan.train.config_example import free_ram
from lohan.train.data.encode import first_tokens
from lohan.train.data.tokenizer import load_tokenizer
from lohan.train.find_run import find_run

_FREE_SHARE = 0.5
"""Of what is free, for weights; the rest is for caches, activations and everybody else. By feel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0: always the likeliest token."""

    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; write 1 or more.")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 or more.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")


@dataclass(frozen=True, slots=True)
class Written:
    text: str
    tokens: list[int]
    """Without the prompt's."""

    seconds: float


class Generator:
    """A model that writes. Made by open_generator(), or from the model of an open run."""

    def __init__(self, streamed: StreamedModel, tokenizer: Any, settings: Any, device: torch.device):
        """`settings`: transformers' GenerationConfig."""
        self.streamed, self.tokenizer = streamed, tokenizer
        self._settings, self._device = settings, device

    def write(
        self, prompt: str, sampling: Sampling, *, raw: bool = False, show: Callable[[str], None] | None = None
    ) -> Written:
        """The model's answer. `show` hears the text as it comes."""
        started = perf_counter()
        ids = torch.tensor([self.encode(prompt, raw=raw)], device=self._device)
        tokens = self.continue_ids(ids, sampling, streamer=None if show is None else LiveText(self.tokenizer, show))[0]
        fresh = tokens[ids.shape[1] :].tolist()
        return Written(self.tokenizer.decode(fresh, skip_special_tokens=True), fresh, perf_counter() - started)

    def encode(self, prompt: str, *, raw: bool) -> list[int]:
        """As in training: through the chat template if there is one, after the begin-of-text token if there is none."""
        if self.tokenizer.chat_template and not raw:
            messages = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = [*first_tokens(self.tokenizer), *self.tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        if not ids:
            raise ConfigError("The prompt is empty. Write something to go on from.")
        positions = self._positions()
        if positions is not None and len(ids) >= positions:
            raise ConfigError(
                f"The prompt has {len(ids)} tokens and the model {positions} positions. Shorten it to fewer than that."
            )
        return list(ids)

    def _positions(self) -> int | None:
        """Tokens the model can tell apart by their place, as its config says."""
        config: Any = self.streamed.model.config
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

    def continue_ids(self, ids: Tensor, sampling: Sampling, *, streamer: Any = None) -> Tensor:
        """Rows of tokens, gone on with. The random state of the process is left as it was."""
        model: Any = self.streamed.model
        devices = [] if self._device.type == "cpu" else [self._device]
        config = self._config(sampling)
        positions = self._positions()
        if positions is not None:  # beyond them a model writes nonsense, or fails
            config.max_new_tokens = max(1, min(config.max_new_tokens, positions - ids.shape[1]))
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(sampling.seed)
            result: Tensor = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer
            )
        return result

    def _config(self, sampling: Sampling) -> Any:
        from copy import deepcopy

        config = deepcopy(self._settings)
        config.max_new_tokens, config.max_length = sampling.max_new_tokens, None
        config.do_sample = sampling.temperature > 0
        config.temperature = sampling.temperature if config.do_sample else None
        config.top_p = sampling.top_p if config.do_sample else None
        config.top_k = 0 if config.do_sample else None
        config.use_cache = True
        return config


@contextmanager
def open_generator(
    place: str | Path,
    *,
    memory: str | int = "auto",
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Iterator[Generator]:
    """A model from a run (its SSD directory, output_dir or config) or a Hugging Face folder.

    `memory` is for weights, on the device they are computed on: what does not fit is read again for every token. auto:
    half of what is free. A run must not be open elsewhere.
    """
    where = _device(device)
    compute = Settings(compute_dtype=dtype).compute(where.type) if dtype is None else dtype_of(dtype, "dtype")
    budget = int(_FREE_SHARE * free_memory(where)) if memory == "auto" else parse_size(memory, name="memory")
    run = _run_or_folder(Path(place))
    with ExitStack() as owned:
        folder = Path(place) if run is None else run / "model"
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        model = build_skeleton(folder, compute_dtype=compute, trust_remote_code=trust_remote_code)
        units = partition(model)
        weights = owned.enter_context(_open_folder(folder, model, units) if run is None else _open_run(run, model))
        move_buffers(model, where)
        streamed = StreamedModel(model, units, weights, memory_bytes=budget, device=where)
        owned.enter_context(streamed)
        owned.enter_context(writing(model))
        yield Generator(streamed, tokenizer, generation_settings(folder, model, tokenizer), where)


@contextmanager
def writing(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode with its caches on, and afterwards as it was."""
    config: Any = model.config
    parts = {id(part): part for part in (config, config.get_text_config())}.values()
    saved = [(part, getattr(part, "use_cache", None)) for part in parts]
    training = model.training
    model.eval()
    try:
        for part, _ in saved:
            part.use_cache = True
        yield
    finally:
        model.train(training)
        for part, value in saved:
            part.use_cache = value


def generation_settings(folder: Path, model: nn.Module, tokenizer: Any) -> Any:
    """The folder's generation settings, with an end for models that name none."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(folder)
    else:
        settings = GenerationConfig.from_model_config(model.config)
    if settings.eos_token_id is None:
        settings.eos_token_id = tokenizer.eos_token_id
    if settings.pad_token_id is None:
        end = settings.eos_token_id
        settings.pad_token_id = end[0] if isinstance(end, list) else end
    return settings


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Tables that are no parameters, to where they are used."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


@contextmanager
def _open_folder(folder: Path, model: nn.Module, units: Units) -> Iterator[Weights]:
    with open_folder(folder) as files:
        checkpoint = match_folder(files, model, units)
        checkpoint.load_buffers(model)
        yield FolderWeights(checkpoint)


@contextmanager
def _open_run(run: Path, model: nn.Module) -> Iterator[Weights]:
    folder = read_run_folder(run)
    directories = run_directories(folder)
    with ExitStack() as owned:
        try:
            owned.enter_context(held(directories))
        except StoreLocked as error:
            raise StoreLocked(
                f"{error} Wait for the run's end, or stop it: it goes on later. While it trains, `sample_prompts` in "
                "its config lets it write after every evaluation."
            ) from None
        store = owned.enter_context(open_store(directories, read_only=True))
        if store.name != folder.info.store:
            raise ConfigError(f"{run} holds another store than the run beside it. Restore the directory.")
        if store.committed_step is None:
            raise ModelError(f"The run in {run} was cut off while it was made and holds no weights.")
        settings = Settings(
            optimizer=folder.info.settings["optimizer"],
            state_format=folder.info.settings["state_format"],
            wire_dtype=wire_dtype(folder.info),
        )
        updater = Updater(settings.make_optimizer(), settings.make_format(), settings.wire)
        origin = folder.origin()
        owned.callback(origin.folder.close)
        origin.load_buffers(model)
        yield StoreWeights(store, folder.layouts(updater))


def _run_or_folder(place: Path) -> Path | None:
    """The first SSD directory of the run that `place` names; None for a Hugging Face folder."""
    run = find_run(place)
    if run is not None or (place / "config.json").is_file():
        return run
    raise ModelError(
        f"{place} is neither a run nor a Hugging Face folder. Give a run's SSD directory or output_dir, or a folder "
        "with config.json and *.safetensors."
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}. Write auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("There is no GPU that torch can use. Choose the device cpu.")
    return device


def free_memory(device: torch.device) -> int:
    """What can still be taken where this device computes."""
    return free_ram() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])
