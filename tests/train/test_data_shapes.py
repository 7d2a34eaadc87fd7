"""Records of every known shape become the same examples, and what does not fit is named."""

from __future__ import annotations

import pytest

from lohan.errors import DataError
from lohan.train.data.shapes import Completion, Conversation, Text, find_shape, read_example

ASKED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]


def read(record, shape=None):
    shape = shape or find_shape(record, "text", "d.jsonl, line 3")
    return read_example(record, shape, "text", "d.jsonl, line 3")


@pytest.mark.parametrize(
    "record",
    [
        {"messages": ASKED},
        {"messages": ASKED, "text": "not this"},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"conversations": ASKED},
        {"instruction": "hi", "output": "yes", "input": ""},
        {"instruction": "hi", "output": "yes", "input": None},
        {"messages": [{**ASKED[0], "tool_calls": None}, {**ASKED[1], "name": None}], "tools": []},
        {"messages": [{"role": "user", "content": PARTS}, ASKED[1]]},
    ],
)  # fmt: skip
def test_every_shape_of_a_conversation_is_the_same_one(record):
    assert read(record) == Conversation(ASKED)


def test_prompts_completions_and_texts_are_told_by_their_keys():
    assert read({"prompt": "a", "completion": "b"}) == Completion("a", "b")
    assert read({"text": "a", "other": 1}) == Text("a")
    assert read({"instruction": "do", "input": "this", "output": "done", "system": "Be kind."}) == Conversation(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "do\n\nthis"},
            {"role": "assistant", "content": "done"},
        ]
    )
    assert find_shape({"body": "x"}, "body", "") == "text"


def test_a_prompt_of_messages_is_not_learnt():
    assert read({"prompt": ASKED, "completion": ASKED}) == Conversation(ASKED + ASKED, learn_from=2)


@pytest.mark.parametrize(
    "record",
    [
        {"text": ""}, {"messages": []}, {"prompt": "a", "completion": ""}, {"instruction": "a", "output": ""},
        {"conversations": []}, {"prompt": ASKED, "completion": []},
    ],
)  # fmt: skip
def test_what_says_nothing_is_empty(record):
    assert read(record) is None


@pytest.mark.parametrize(
    ("record", "shape", "expected"),
    [
        ({"question": "a", "answer": "b"}, None, "an example needs the keys messages, or conversations,"),
        ({}, None, "this one has none."),
        ({"txt": "a"}, "text", "there is no text. Did you mean txt? Its keys are txt."),
        ({"text": 3}, None, "text must be text, and it is int 3."),
        ({"text": "a\ud800"}, None, "text has half a character at 2"),
        ({"prompt": "a", "completion": 3}, None, "completion must be text, and it is int 3."),
        ({"prompt": "a", "completion": ASKED}, None, "prompt and completion must both be text or both"),
        ({"prompt": "a"}, "prompt-completion", "there is no completion."),
        ({"instruction": "a", "output": ["b"]}, None, "output must be text, and it is list ['b']."),
        ({"messages": "hi"}, None, "messages must be a list of messages, and it is str 'hi'."),
        ({"messages": ["hi"]}, None, "message 1 of messages must be an object like"),
        ({"messages": [ASKED[0], {"content": "x"}]}, None, "message 2 of messages has no role."),
        ({"messages": [{"role": "user"}]}, None, "message 1 of messages has no content."),
        ({"messages": [{"role": "user", "content": 3}]}, None, "message 1 of messages has a content that is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, None, "a part of type 'image'"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, None, "message 1 of conversations is from 'alien'."),
        ({"messages": ASKED, "tools": "x"}, None, "tools must be a list"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_by_its_place(record, shape, expected):
    with pytest.raises(DataError) as caught:
        read(record, shape)
    assert str(caught.value).startswith("d.jsonl, line 3: ")
    assert expected in str(caught.value)
