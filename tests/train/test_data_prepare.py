"""Files are tokenised once, whole, and counted; held-out examples stay apart."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from tiny_tokenizers import CHATML, THINKING, byte_level

from lohan.errors import ConfigError, DataError, ModelError
from lohan.train.config import TrainConfig
from lohan.train.data import prepare
from lohan.train.data.prepare import DataSettings, tokenise
from lohan.train.data.splits import choose_held_out, open_data
from lohan.train.data.tokenizer import load_tokenizer

TOKENIZER = byte_level()
CHAT = byte_level(CHATML)
SETTINGS = DataSettings(max_length=64)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(num, start=0):
    return [{"text": f"example {n} of the lazy dog"} for n in range(start, start + num)]


def config(tmp_path, **changed):
    base = {"model_name_or_path": "m", "output_dir": str(tmp_path / "out"), "ssd": ("s",), "max_length": 64}
    return TrainConfig(**{**base, "train_file": (str(tmp_path / "a.jsonl"),), **changed})


def test_what_is_tokenised_is_what_was_written(tmp_path):
    write(tmp_path / "a.jsonl", texts(300))
    arrays = tokenise([tmp_path / "a.jsonl"], TOKENIZER, SETTINGS, tmp_path / "cache")
    assert len(arrays) == 300
    for index in (0, 1, 150, 299):
        assert TOKENIZER.decode(arrays[index].ids) == f"example {index} of the lazy dog</s>"
        assert arrays[index].learnt.tolist() == [False] + [True] * (len(arrays[index].ids) - 1)
    assert arrays.lengths.sum() == arrays.counts.tokens
    assert arrays.counts.labels == arrays.counts.tokens - 300


def test_files_are_read_in_their_order_and_may_have_unlike_shapes(tmp_path):
    write(tmp_path / "a.jsonl", texts(2))
    write(tmp_path / "b.jsonl", [{"prompt": "The", "completion": " dog"}])
    arrays = tokenise([tmp_path / "b.jsonl", tmp_path / "a.jsonl"], TOKENIZER, SETTINGS, tmp_path / "cache")
    assert [TOKENIZER.decode(arrays[i].ids)[:7] for i in range(3)] == ["The dog", "example", "example"]


def test_everything_left_out_or_cut_off_is_counted(tmp_path):
    said = {"role": "user", "content": "Hello"}
    answered = {"role": "assistant", "content": "Yes. " * 50}
    path = write(
        tmp_path / "a.jsonl",
        [
            {"messages": [said, answered]},
            {"messages": []},
            {"messages": [said]},
            {"messages": [{**said, "content": "Hello " * 100}, answered]},
            {"messages": [said, {**answered, "content": "Yes"}]},
        ],
    )
    counts = tokenise([path], CHAT, SETTINGS, tmp_path / "cache").counts
    assert (counts.records, counts.examples, counts.empty, counts.without_label) == (5, 2, 1, 2)
    assert counts.truncated == 2
    assert counts.longest == 64
    assert counts.cut_tokens > 200
    told = "\n".join(counts.sentences(64))
    for part in (
        "2 examples are longer than max_length=64",
        "1 empty examples",
        "2 examples without anything to learn",
    ):
        assert part in told


def test_conversations_that_had_to_be_split_are_counted(tmp_path):
    turns = [{"role": role, "content": "Yes"} for role in ("user", "assistant") * 3]
    path = write(tmp_path / "a.jsonl", [{"messages": turns}])
    counts = tokenise([path], byte_level(THINKING), DataSettings(max_length=500), tmp_path / "cache").counts
    assert (counts.records, counts.examples, counts.split) == (1, 3, 1)


def test_nothing_is_tokenised_twice(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", texts(5))
    first = tokenise([path], TOKENIZER, SETTINGS, tmp_path / "cache")
    monkeypatch.setattr(prepare, "_write", lambda *_: pytest.fail("tokenised again"))
    assert tokenise([path], TOKENIZER, SETTINGS, tmp_path / "cache").folder == first.folder
    moved = path.rename(tmp_path / "b.jsonl")
    os.utime(moved, (1, 1))  # another name and time, the same content
    assert tokenise([moved], TOKENIZER, SETTINGS, tmp_path / "cache").folder == first.folder


def test_what_the_result_depends_on_is_in_the_key(tmp_path):
    path = write(tmp_path / "a.jsonl", texts(5))
    cache = tmp_path / "cache"
    keys = [
        tokenise([path], TOKENIZER, SETTINGS, cache).folder,
        tokenise([path], byte_level(bos=True), SETTINGS, cache).folder,
        tokenise([path], CHAT, SETTINGS, cache).folder,
        tokenise([path], TOKENIZER, DataSettings(max_length=63), cache).folder,
        tokenise([path, path], TOKENIZER, SETTINGS, cache).folder,
    ]
    write(path, texts(5, start=1))
    keys.append(tokenise([path], TOKENIZER, SETTINGS, cache).folder)
    assert len(set(keys)) == len(keys)


def test_a_template_that_writes_the_date_gives_another_fingerprint_another_day(tmp_path, monkeypatch):
    """The folder's name cannot know it; a run that goes on without its cache must."""
    from transformers.utils import chat_template_utils

    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    tokenizer = byte_level("{{ strftime_now('%d') }}" + CHATML)
    contents = []
    for day in ("one", "one", "two"):
        monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", lambda text, day=day: _Template(text, day))
        contents.append(tokenise([path], tokenizer, SETTINGS, tmp_path / f"cache-{len(contents)}").content)
    assert contents[0] == contents[1] != contents[2]


class _Template:
    def __init__(self, text, day):
        import jinja2

        self._inner = jinja2.Template(text)
        self._inner.globals["strftime_now"] = lambda _: day

    def render(self, **values):
        return self._inner.render(**values)


def test_a_cache_that_was_cut_short_is_made_again(tmp_path):
    path = write(tmp_path / "a.jsonl", texts(5))
    arrays = tokenise([path], TOKENIZER, SETTINGS, tmp_path / "cache")
    expected = arrays[3].ids.tolist()
    with open(arrays.folder / "tokens.i32", "r+b") as file:
        file.truncate(8)
    assert tokenise([path], TOKENIZER, SETTINGS, tmp_path / "cache")[3].ids.tolist() == expected


def test_an_error_names_the_line_and_leaves_nothing_behind(tmp_path):
    path = write(tmp_path / "a.jsonl", [*texts(300), {"text": 3}])
    with pytest.raises(DataError, match=r"a.jsonl, line 301: text must be text, and it is int 3."):
        tokenise([path], TOKENIZER, SETTINGS, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], "a.jsonl: there are no examples."),
        ([{"text": ""}], "none of the 1 examples can be learnt from: 1 are empty and 0 have nothing to learn."),
        ([{"messages": [{"role": "user", "content": "x"}]}], "Check that answers are there, with the role assistant."),
        ([{"prompt": "x " * 200, "completion": "y"}], "Raise max_length (now 64): the answers are cut off."),
        ([{"text": "a"}, {"prompt": "x", "completion": "y"}], "a.jsonl, line 2: there is no text."),
    ],
)
def test_data_that_cannot_be_used_is_refused(tmp_path, records, expected):
    path = write(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError) as caught:
        tokenise([path], TOKENIZER, SETTINGS, tmp_path / "cache")
    assert expected in str(caught.value)


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path):
    path = write(tmp_path / "a.jsonl", texts(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"Set dataset_cache_dir"):
        tokenise([path], TOKENIZER, SETTINGS, tmp_path / "file" / "cache")


def test_a_share_is_held_out_and_equal_examples_stay_together(tmp_path):
    write(tmp_path / "a.jsonl", texts(200) + texts(200))
    data = open_data(config(tmp_path, eval_share=0.1), TOKENIZER)
    assert data.held_out.num_examples == 40
    assert data.train.num_examples == 360
    rows = {
        name: {tuple(split._arrays[i].ids.tolist()) for i in split._examples.tolist()}
        for name, split in (("train", data.train), ("test", data.held_out))
    }
    assert not rows["train"] & rows["test"]
    assert len(rows["train"] | rows["test"]) == 200


def test_the_held_out_share_depends_on_the_seed_and_hardly_on_other_examples(tmp_path):
    chosen = []
    for name, records in (("a", texts(400)), ("b", texts(400)[::-1]), ("c", texts(420))):
        arrays = tokenise([write(tmp_path / f"{name}.jsonl", records)], TOKENIZER, SETTINGS, tmp_path / "cache")
        chosen.append({TOKENIZER.decode(arrays[i].ids) for i in choose_held_out(arrays, 0.1, 1).tolist()})
    assert chosen[0] == chosen[1]
    assert len(chosen[0] & chosen[2]) >= 36
    assert not np.array_equal(choose_held_out(arrays, 0.1, 1), choose_held_out(arrays, 0.1, 2))


def test_a_share_that_would_leave_nothing_is_refused(tmp_path):
    write(tmp_path / "a.jsonl", texts(1) * 5)
    with pytest.raises(ConfigError, match=r"eval_share: 0.1 holds out all 5 examples"):
        open_data(config(tmp_path, eval_share=0.1), TOKENIZER)


def test_a_file_of_its_own_is_held_out_up_to_the_number_asked_for(tmp_path):
    write(tmp_path / "a.jsonl", texts(20))
    write(tmp_path / "e.jsonl", texts(10, start=50))
    data = open_data(config(tmp_path, eval_file=(str(tmp_path / "e.jsonl"),), max_eval_samples=3), TOKENIZER)
    assert (data.train.num_examples, data.held_out.num_examples) == (20, 3)
    assert open_data(config(tmp_path), TOKENIZER).held_out is None


def test_packing_is_reported(tmp_path):
    write(tmp_path / "a.jsonl", texts(50))
    data = open_data(config(tmp_path, packing=True), TOKENIZER)
    assert data.train.num_rows < 20
    assert any(f"packed into {data.train.num_rows} rows of 64 tokens" in sentence for sentence in data.report)


def test_a_tokenizer_comes_from_the_folder_and_a_template_from_its_file(tmp_path):
    CHAT.save_pretrained(tmp_path / "model")
    assert load_tokenizer(tmp_path / "model").chat_template == CHATML
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert load_tokenizer(tmp_path / "model", chat_template_path=tmp_path / "t.jinja").chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"chat_template_path: .*no.jinja cannot be read"):
        load_tokenizer(tmp_path / "model", chat_template_path=tmp_path / "no.jinja")
    with pytest.raises(ModelError, match=r"is not a folder. Set model_name_or_path"):
        load_tokenizer("meta-llama/Llama-3.1-8B")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no tokenizer that transformers can load"):
        load_tokenizer(tmp_path / "empty")
