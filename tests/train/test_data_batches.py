"""Micro-batches are a function of data, settings and step; nothing is lost, mixed or shown twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.errors import ConfigError
from lohan.train.data.batches import BatchSettings, TokenData, causal_blocks
from lohan.train.data.cache import Counts
from lohan.train.data.encode import Tokens


class Arrays:
    """Tokenised data in memory: example i is so many tokens, all of them i + 1."""

    content = "content"
    counts = Counts()

    def __init__(self, lengths):
        self.lengths = np.array(lengths, dtype=np.int64)
        self.records = np.arange(len(lengths), dtype=np.uint64)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        length = int(self.lengths[index])
        return Tokens(np.full(length, index + 1, dtype=np.int32), np.arange(length) > 0)


def make(lengths, **settings):
    return TokenData(Arrays(lengths), np.arange(len(lengths)), BatchSettings(**{"batch_rows": 2, **settings}))


def same(one, other) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=40)
SETTINGS = st.builds(
    BatchSettings,
    batch_rows=st.integers(1, 4),
    num_micro_batches=st.integers(1, 4),
    seed=st.integers(0, 5),
    packed_tokens=st.sampled_from([None, 20, 33]),
)


@given(lengths=LENGTHS, chosen=SETTINGS)
@settings(deadline=None, max_examples=60)
def test_an_epoch_shows_every_token_of_every_example_once(lengths, chosen):
    data = TokenData(Arrays(lengths), np.arange(len(lengths)), chosen)
    for epoch in range(2):
        seen: dict[int, int] = {}
        for step in range(epoch * data.steps_per_epoch + 1, (epoch + 1) * data.steps_per_epoch + 1):
            batches = data.micro_batches(step)
            assert 1 <= len(batches) <= chosen.num_micro_batches
            for batch in batches:
                assert 1 <= len(batch["input_ids"]) <= chosen.batch_rows
                for token in batch["input_ids"][batch["input_ids"] > 0].tolist():
                    seen[token] = seen.get(token, 0) + 1
        assert seen == {index + 1: length for index, length in enumerate(lengths)}
    assert data.num_tokens == sum(lengths)


@given(lengths=LENGTHS, chosen=SETTINGS, step=st.integers(1, 200))
@settings(deadline=None, max_examples=60)
def test_a_run_that_goes_on_at_any_step_gets_what_it_would_have_got(lengths, chosen, step):
    never_stopped = TokenData(Arrays(lengths), np.arange(len(lengths)), chosen)
    for earlier in range(max(1, step - 3), step):
        never_stopped.micro_batches(earlier)
    resumed = TokenData(Arrays(lengths), np.arange(len(lengths)), chosen)
    assert same(never_stopped.micro_batches(step), resumed.micro_batches(step))


@given(lengths=LENGTHS, chosen=SETTINGS, num_steps=st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_the_largest_shape_is_that_of_the_largest_step(lengths, chosen, num_steps):
    data = TokenData(Arrays(lengths), np.arange(len(lengths)), chosen)
    sizes = [[batch["labels"].numel() for batch in data.micro_batches(step)] for step in range(1, num_steps + 1)]
    assert data.largest_shape(num_steps) == (max(max(each) for each in sizes), max(sum(each) for each in sizes))


@given(lengths=LENGTHS, rows=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_packed_rows_keep_their_examples_apart(lengths, rows):
    data = make(lengths, batch_rows=rows, packed_tokens=25)
    for step in range(1, data.steps_per_epoch + 1):
        for batch in data.micro_batches(step):
            assert set(batch) == {"input_ids", "position_ids", "labels"}
            assert batch["input_ids"].shape[1] <= 25
            for ids, positions, labels in zip(*batch.values(), strict=True):
                starts = (positions == 0).nonzero().flatten().tolist()
                for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                    assert positions[start:end].tolist() == list(range(end - start))
                    assert len(set(ids[start:end].tolist())) == 1  # of one example
                    assert labels[start] == -100  # nothing of another example predicts it
                    assert torch.equal(labels[start + 1 : end], ids[start + 1 : end]) or ids[start] == 0
                assert (labels[ids == 0] == -100).all()


def test_rows_are_filled_up_on_the_right_to_the_longest_of_the_micro_batch():
    data = make([3, 5], pad_token=9)
    [batch] = data.micro_batches(1)
    assert sorted(map(tuple, batch["input_ids"].tolist())) == [(1, 1, 1, 9, 9), (2, 2, 2, 2, 2)]
    short = int((batch["input_ids"][:, 0] == 1).nonzero())
    assert batch["attention_mask"][short].tolist() == [1, 1, 1, 0, 0]
    assert batch["labels"][short].tolist() == [-100, 1, 1, -100, -100]


def test_what_is_left_of_an_epoch_is_a_smaller_step_or_left_out():
    data = make([1] * 11, num_micro_batches=3)
    assert data.steps_per_epoch == 2
    assert [len(batch["input_ids"]) for batch in data.micro_batches(2)] == [2, 2, 1]
    assert data.epoch_of(3) == 1.5
    dropping = make([1] * 11, num_micro_batches=3, drop_last=True)
    assert dropping.steps_per_epoch == 1
    with pytest.raises(ConfigError, match=r"A step has 12 rows and the data 11.*dataloader_drop_last: false"):
        make([1] * 11, num_micro_batches=6, drop_last=True)


def test_epochs_and_seeds_have_orders_of_their_own():
    data = make(list(range(1, 40)))
    orders = [
        tuple(row for step in range(1, 21) for row in each.rows_of(step + shift).tolist())
        for each in (data, make(list(range(1, 40)), seed=1))
        for shift in (0, 20)
    ]
    assert len(set(orders)) == 4


def test_in_order_shows_everything_once():
    data = make([2, 3, 4])
    assert [batch["input_ids"][:, 0].tolist() for batch in data.in_order()] == [[1, 2], [3]]


def test_steps_are_counted_from_one():
    with pytest.raises(ValueError):
        make([1]).micro_batches(0)


def test_the_explicit_mask_is_causal_within_each_example():
    mask = causal_blocks(torch.tensor([[0, 1, 0, 1, 2]]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    data = make([3, 4], packed_tokens=10)
    masked = TokenData(Arrays([3, 4]), np.arange(2), replace(data.settings, block_mask=True))
    assert masked.micro_batches(1)[0]["attention_mask"].shape == (1, 1, 7, 7)
