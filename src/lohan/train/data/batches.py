"""TokenData: the micro-batches of every step, as a function of the data, the settings and the step.

A step has rows_per_step rows: `batch_rows` in each of `num_micro_batches` micro-batches. Epochs go through all rows in
an order of their own, made from seed and epoch (order.py). What is left at the end of an epoch is a smaller step, whose
last micro-batch may be smaller too and which may have fewer of them; with drop_last it is left out. Nothing is kept
between calls, so a run that goes on at step t gets what it would have got.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lohan.errors import ConfigError
from lohan.train.data.cache import TokenArrays
from lohan.train.data.encode import Tokens
from lohan.train.data.order import Indices, mix, shuffled
from lohan.train.data.packing import Rows, one_each, pack

NO_LABEL = -100
MicroBatch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    batch_rows: int
    num_micro_batches: int = 1
    seed: int = 0
    drop_last: bool = False
    packed_tokens: int | None = None
    """Tokens of a packed row; None: every example has its own row."""

    block_mask: bool = False
    """Hand packed rows an explicit mask, for models that do not make one from position_ids (packed_model.py)."""

    pad_token: int = 0


class TokenData:
    """Examples of one split in rows and steps."""

    def __init__(self, arrays: TokenArrays, examples: Indices, settings: BatchSettings):
        if len(examples) == 0:
            raise ConfigError("There are no examples to train on: eval_share holds all of them out. Lower it.")
        self.settings = settings
        self._arrays, self._examples = arrays, examples
        lengths = arrays.lengths[examples]
        packed = settings.packed_tokens
        self._rows: Rows = one_each(len(examples)) if packed is None else pack(lengths, packed)
        self.num_examples = len(examples)
        self.num_tokens = int(lengths.sum())
        self.fingerprint = arrays.content
        """Of all tokens: equal if and only if tokenising gave the same, wherever the files are."""

        self._row_tokens = np.add.reduceat(lengths[self._rows.examples], self._rows.starts[:-1])
        self.longest_row = int(self._row_tokens.max())
        if settings.drop_last and self.num_rows < self.rows_per_step:
            raise ConfigError(
                f"A step has {self.rows_per_step} rows and the data {self.num_rows}, which dataloader_drop_last would "
                "leave out. Set dataloader_drop_last: false, or lower gradient_accumulation_steps."
            )

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def rows_per_step(self) -> int:
        return self.settings.batch_rows * self.settings.num_micro_batches

    @property
    def steps_per_epoch(self) -> int:
        if self.settings.drop_last:
            return self.num_rows // self.rows_per_step
        return -(-self.num_rows // self.rows_per_step)

    def epoch_of(self, step: int) -> float:
        """Epochs done after this step."""
        return step / self.steps_per_epoch

    def rows_of(self, step: int, num_steps: int = 1) -> Indices:
        """The rows of a step, counted from 1, in order; or of several steps of one epoch."""
        if step < 1:
            raise ValueError(f"step is {step}; steps are counted from 1")
        epoch, within = divmod(step - 1, self.steps_per_epoch)
        start = within * self.rows_per_step
        positions = np.arange(start, min(start + num_steps * self.rows_per_step, self.num_rows))
        return shuffled(positions, self.num_rows, mix(self.settings.seed, epoch))

    def tokens_of(self, step: int) -> int:
        """Tokens of a step without filling."""
        return int(self._row_tokens[self.rows_of(step)].sum())

    def largest_shape(self, num_steps: int) -> tuple[int, int]:
        """The most tokens, filling included, of a micro-batch and of a step in steps 1 to num_steps: what memory must
        hold. Looks at lengths only."""
        micro, whole = 0, 0
        for epoch in range(-(-num_steps // self.steps_per_epoch)):
            done = epoch * self.steps_per_epoch
            rows = self.rows_of(done + 1, min(self.steps_per_epoch, num_steps - done))
            # A micro-batch never spans two steps: only an epoch's last step is not whole.
            starts = np.arange(0, len(rows), self.settings.batch_rows)
            widths = np.maximum.reduceat(self._row_tokens[rows], starts)
            tokens = widths * np.diff(np.append(starts, len(rows)))
            steps = np.add.reduceat(tokens, np.arange(0, len(tokens), self.settings.num_micro_batches))
            micro, whole = max(micro, int(tokens.max())), max(whole, int(steps.max()))
        return micro, whole

    def sizes_in_order(self) -> list[int]:
        """Tokens, filling included, of every micro-batch of in_order(). Looks at lengths only."""
        starts = np.arange(0, self.num_rows, self.settings.batch_rows)
        widths = np.maximum.reduceat(self._row_tokens, starts)
        return [int(size) for size in widths * np.diff(np.append(starts, self.num_rows))]

    def examples_of(self, row: int) -> Indices:
        """The examples in a row, as numbers of the tokenised data."""
        return self._examples[self._rows[row]]

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """What Run.step() takes."""
        rows, size = self.rows_of(step), self.settings.batch_rows
        return [self._collate(rows[start : start + size]) for start in range(0, len(rows), size)]

    def in_order(self) -> Iterator[MicroBatch]:
        """All rows once, unshuffled, for evaluation."""
        for start in range(0, self.num_rows, self.settings.batch_rows):
            yield self._collate(np.arange(start, min(start + self.settings.batch_rows, self.num_rows)))

    def _collate(self, rows: Indices) -> MicroBatch:
        examples = [[self._arrays[index] for index in self.examples_of(row).tolist()] for row in rows.tolist()]
        if self.settings.packed_tokens is None:
            return pad([row[0] for row in examples], self.settings.pad_token)
        return pad_packed(examples, self.settings.pad_token, block_mask=self.settings.block_mask)


def pad(examples: list[Tokens], pad_token: int) -> MicroBatch:
    """One example per row, filled up on the right to the longest."""
    width = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), width), pad_token, dtype=torch.int64)
    labels = torch.full((len(examples), width), NO_LABEL, dtype=torch.int64)
    mask = torch.zeros((len(examples), width), dtype=torch.int64)
    for row, example in enumerate(examples):
        _put(example, ids[row], labels[row])
        mask[row, : len(example.ids)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def pad_packed(rows: list[list[Tokens]], pad_token: int, *, block_mask: bool) -> MicroBatch:
    """Several examples per row. Positions begin at 0 with each of them: that is how transformers tells them apart, and
    only if no attention_mask is given. Filling counts as one more example."""
    width = max(sum(len(example.ids) for example in row) for row in rows)
    ids = torch.full((len(rows), width), pad_token, dtype=torch.int64)
    labels = torch.full((len(rows), width), NO_LABEL, dtype=torch.int64)
    positions = torch.zeros((len(rows), width), dtype=torch.int64)
    for row, examples in enumerate(rows):
        at = 0
        for example in examples:
            length = len(example.ids)
            _put(example, ids[row, at:], labels[row, at:])
            positions[row, at : at + length] = torch.arange(length)
            at += length
        positions[row, at:] = torch.arange(width - at)
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    if block_mask:
        batch["attention_mask"] = causal_blocks(positions)
    return batch


def causal_blocks(positions: Tensor) -> Tensor:
    """Which token sees which, [rows, 1, tokens, tokens]: itself and those before it in its own example."""
    block = (positions == 0).cumsum(1)
    tokens = torch.arange(positions.shape[1])
    same = block[:, :, None] == block[:, None, :]
    return (same & (tokens[None, :, None] >= tokens[None, None, :]))[:, None]


def _put(example: Tokens, ids: Tensor, labels: Tensor) -> None:
    length = len(example.ids)
    tokens = torch.from_numpy(example.ids.astype(np.int64))
    ids[:length] = tokens
    labels[:length] = torch.where(torch.from_numpy(example.learnt), tokens, NO_LABEL)
