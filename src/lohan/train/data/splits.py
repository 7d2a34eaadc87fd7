"""The data of a training run: what is trained on and what is held out.

A held-out share is chosen by the content of the records and the seed: equal records are on one side, so nothing that
is trained on is also tested on, and adding or reordering records moves few of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lohan.errors import ConfigError
from lohan.train.config import TrainConfig
from lohan.train.data.batches import BatchSettings, TokenData
from lohan.train.data.cache import TokenArrays
from lohan.train.data.files import open_reader
from lohan.train.data.order import Indices, mix, mixed
from lohan.train.data.prepare import DataSettings, Progress, tokenise
from lohan.train.data.progress import byte_bar
from lohan.train.data.tokenizer import pad_token


@dataclass(frozen=True, slots=True)
class Splits:
    train: TokenData
    held_out: TokenData | None
    max_token: int
    """The largest token in either: the model must have more than so many."""

    report: tuple[str, ...]
    """What was found and left out, a sentence each."""


def open_data(
    config: TrainConfig, tokenizer: Any, *, block_mask: bool = False, progress: Progress | None = None
) -> Splits:
    """Tokenise what is not yet tokenised, and split it. Without `progress`, a bar is shown on a terminal."""
    settings = DataSettings(
        max_length=config.max_length,
        dataset_format=config.dataset_format,
        dataset_text_field=config.dataset_text_field,
        assistant_only_loss=config.assistant_only_loss,
        apply_chat_template=config.apply_chat_template,
    )
    cache = Path(config.output_dir) / "data" if config.dataset_cache_dir is None else Path(config.dataset_cache_dir)

    def read(files: tuple[str, ...], what: str) -> TokenArrays:
        if progress is not None:
            return tokenise(files, tokenizer, settings, cache, progress)
        with byte_bar(what) as bar:
            return tokenise(files, tokenizer, settings, cache, bar)

    for file in (*config.train_file, *config.eval_file):
        open_reader(Path(file))  # one that is not there is told before the others are read
    arrays = read(config.train_file, "Tokenising")
    tested = read(config.eval_file, "Tokenising eval_file") if config.eval_file else arrays
    if config.eval_file:
        trained_on, held_out = np.arange(len(arrays)), np.arange(len(tested))
    else:
        held_out = choose_held_out(arrays, config.eval_share, config.order_seed)
        trained_on = np.setdiff1d(np.arange(len(arrays)), held_out, assume_unique=True)
    if len(trained_on) == 0:
        raise ConfigError(
            f"eval_share: {config.eval_share:g} holds out all {len(arrays)} examples, because they come from equal or "
            "too few records. Lower it, or give an eval_file."
        )
    if config.max_eval_samples is not None:
        held_out = held_out[: config.max_eval_samples]
    packed = config.max_length if config.packing else None
    rows = config.per_device_eval_batch_size or config.per_device_train_batch_size
    evaluated = BatchSettings(
        batch_rows=rows,
        seed=config.order_seed,
        packed_tokens=packed,
        block_mask=block_mask,
        pad_token=pad_token(tokenizer),
    )
    trained = replace(
        evaluated,
        batch_rows=config.per_device_train_batch_size,
        num_micro_batches=config.gradient_accumulation_steps,
        drop_last=config.dataloader_drop_last,
    )
    train = TokenData(arrays, trained_on, trained)
    test = TokenData(tested, held_out, evaluated) if len(held_out) else None
    return Splits(
        train, test, max(arrays.counts.max_token, tested.counts.max_token), _report(config, arrays, tested, train, test)
    )


def choose_held_out(arrays: TokenArrays, share: float, seed: int) -> Indices:
    """About this share of the examples, at least one if any is asked for: those whose records have the lowest hash."""
    if share == 0:
        return np.zeros(0, dtype=np.int64)
    ranks = mixed(np.asarray(arrays.records) ^ np.uint64(mix(seed, 0x68656C646F7574)))
    wanted = max(1, round(share * len(arrays)))
    limit = np.partition(ranks, wanted - 1)[wanted - 1]
    return np.flatnonzero(ranks <= limit)


def _report(
    config: TrainConfig, arrays: TokenArrays, tested: TokenArrays, train: TokenData, test: TokenData | None
) -> tuple[str, ...]:
    said = arrays.counts.sentences(config.max_length)
    if tested is not arrays:
        said += [f"eval_file: {sentence}" for sentence in tested.counts.sentences(config.max_length)]
    if config.packing:
        filled = train.num_tokens / (train.num_rows * config.max_length)
        said.append(f"packed into {train.num_rows:,} rows of {config.max_length} tokens, {filled:.1%} filled")
    if test is not None:
        held = test.num_examples
        said.append(f"{held:,} example{'s are' if held != 1 else ' is'} held out")
    return tuple(said)
