"""Exactly the answers are learnt, whatever the template and the tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHATML, FORCED, MARKED, STRICT, THINKING, byte_level, sentence_piece

from lohan.errors import DataError
from lohan.train.data.encode import Encoder
from lohan.train.data.shapes import Completion, Conversation, Text

TURNS = [
    {"role": "user", "content": "Hello there!"},
    {"role": "assistant", "content": "I am fine."},
    {"role": "user", "content": "What is two?"},
    {"role": "assistant", "content": "It is four"},
]
BYTES = {template: byte_level(template) for template in (None, CHATML, MARKED, THINKING, FORCED, STRICT)}


def encode(tokenizer, example, *, answers_only=True, use_template=True):
    encoder = Encoder(tokenizer, answers_only=answers_only, use_template=use_template)
    return encoder.encode([("d.jsonl, line 7", example)])[0]


def learnt(tokenizer, tokens) -> str:
    return tokenizer.decode(tokens.ids[tokens.learnt])


def whole(tokenizer, tokens) -> str:
    return tokenizer.decode(tokens.ids)


def test_a_template_without_marks_learns_every_answer_and_its_end():
    [tokens] = encode(BYTES[CHATML], Conversation(TURNS))
    assert learnt(BYTES[CHATML], tokens) == "I am fine.<|im_end|>\nIt is four<|im_end|>\n"
    assert whole(BYTES[CHATML], tokens) == BYTES[CHATML].apply_chat_template(TURNS, tokenize=False)


def test_marks_in_a_template_are_followed():
    [tokens] = encode(BYTES[MARKED], Conversation(TURNS))
    assert learnt(BYTES[MARKED], tokens) == "I am fine.<|im_end|>It is four<|im_end|>"


def test_the_marks_agree_with_those_transformers_finds():
    tokenizer = BYTES[MARKED]
    [tokens] = encode(tokenizer, Conversation(TURNS))
    theirs = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert tokens.ids.tolist() == theirs["input_ids"]
    assert tokens.learnt.astype(int).tolist() == theirs["assistant_masks"]


def test_the_prompt_has_the_tokens_it_will_have_when_the_model_is_asked():
    for template in (CHATML, MARKED, THINKING):
        tokenizer = BYTES[template]
        [tokens] = encode(tokenizer, Conversation(TURNS[:2]))
        prompt = tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True)["input_ids"]
        assert tokens.ids[: len(prompt)].tolist() == prompt
        assert tokens.learnt.argmax() == len(prompt)


def test_a_template_that_shows_earlier_answers_differently_gives_an_example_per_answer():
    first, second = encode(BYTES[THINKING], Conversation(TURNS))
    assert learnt(BYTES[THINKING], first) == "<think>\n\n</think>\n\nI am fine.<|im_end|>\n"
    assert learnt(BYTES[THINKING], second) == "<think>\n\n</think>\n\nIt is four<|im_end|>\n"
    assert whole(BYTES[THINKING], second) == BYTES[THINKING].apply_chat_template(TURNS, tokenize=False)


def test_a_template_whose_prompt_does_not_lead_to_the_answer_is_refused_by_name():
    with pytest.raises(DataError, match=r"d.jsonl, line 7: the chat template ends the prompt for answer 2") as caught:
        encode(BYTES[FORCED], Conversation(TURNS))
    assert "chat_template_path" in str(caught.value)


def test_what_a_template_refuses_is_named():
    with pytest.raises(DataError, match=r"d.jsonl, line 7: the chat template refuses this .* No system role here"):
        encode(BYTES[STRICT], Conversation([{"role": "system", "content": "x"}, *TURNS]))


def test_an_answer_without_an_end_gets_one():
    tokenizer = byte_level(CHATML.replace("<|im_end|>\n{% endfor %}", "{% endfor %}"))
    [tokens] = encode(tokenizer, Conversation(TURNS))
    assert learnt(tokenizer, tokens) == "I am fine.It is four</s>"
    [tokens] = encode(BYTES[CHATML], Conversation(TURNS))
    assert "</s>" not in whole(BYTES[CHATML], tokens)


def test_a_message_that_only_calls_a_tool_has_the_content_its_template_wants():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    strict = CHATML.replace("{{ message['content'] }}", "{{ message['content'].strip() }}{{ message['tool_calls'] }}")
    lenient = CHATML.replace("{{ message['content'] }}", "{{ 'calls' if message['content'] is none else 'says' }}")
    for template, expected in ((strict, "add"), (lenient, "calls")):
        tokenizer = byte_level(template)
        [tokens] = encode(tokenizer, Conversation([TURNS[0], call]))
        assert expected in learnt(tokenizer, tokens)


def test_answers_in_a_prompt_are_not_learnt():
    for template in (CHATML, MARKED, None):
        [tokens] = encode(BYTES[template], Conversation(TURNS, learn_from=2))
        assert "It is four" in learnt(BYTES[template], tokens)
        assert "I am fine" not in learnt(BYTES[template], tokens)


def test_what_follows_the_last_answer_is_left_out():
    [tokens] = encode(BYTES[CHATML], Conversation(TURNS[:3]))
    assert "two" not in whole(BYTES[CHATML], tokens)
    assert encode(BYTES[CHATML], Conversation(TURNS[:1])) == []


def test_all_tokens_can_be_learnt():
    for template in (CHATML, MARKED, None):
        [tokens] = encode(BYTES[template], Conversation(TURNS[:3]), answers_only=False)
        assert tokens.learnt.tolist() == [False] + [True] * (len(tokens.ids) - 1)
        assert "What is two?" in whole(BYTES[template], tokens)


def test_without_a_template_the_plain_form_is_used():
    [tokens] = encode(BYTES[None], Conversation([{"role": "system", "content": "Be kind."}, *TURNS]))
    assert whole(BYTES[None], tokens) == (
        "Be kind.\n\nUser: Hello there!\n\nAssistant: I am fine.</s>\n\nUser: What is two?\n\nAssistant: It is four</s>"
    )
    assert learnt(BYTES[None], tokens) == " I am fine.</s> It is four</s>"
    [same] = encode(BYTES[CHATML], Conversation(TURNS), use_template=False)
    assert whole(BYTES[CHATML], same).startswith("User: Hello there!\n\nAssistant:")


def test_prompt_and_completion_go_through_the_template_or_stand_as_they_are():
    example = Completion("The lazy", " dog")
    [tokens] = encode(BYTES[CHATML], example)
    assert (
        whole(BYTES[CHATML], tokens) == "<|im_start|>user\nThe lazy<|im_end|>\n<|im_start|>assistant\n dog<|im_end|>\n"
    )
    [tokens] = encode(BYTES[None], example)
    assert (whole(BYTES[None], tokens), learnt(BYTES[None], tokens)) == ("The lazy dog</s>", " dog</s>")
    tokenizer = byte_level(bos=True)
    [tokens] = encode(tokenizer, example)
    assert whole(tokenizer, tokens) == "<s>The lazy dog</s>"
    assert tokens.learnt.tolist()[:1] == [False]


def test_a_text_is_learnt_from_its_second_token_on():
    tokenizer = byte_level(bos=True)
    [tokens] = encode(tokenizer, Text("The dog"))
    assert (whole(tokenizer, tokens), learnt(tokenizer, tokens)) == ("<s>The dog</s>", "The dog</s>")
    [tokens] = encode(BYTES[None], Text("The dog"))
    assert learnt(BYTES[None], tokens) == " dog</s>"


def test_a_token_across_the_edge_is_cut_where_that_spells_the_same():
    """' dog' is one token; here its space belongs to the prompt."""
    [tokens] = encode(BYTES[None], Completion("The lazy ", "dog"))
    assert whole(BYTES[None], tokens) == "The lazy dog</s>"
    assert learnt(BYTES[None], tokens) == "dog</s>"


def test_a_token_across_the_edge_is_refused_where_it_cannot_be_cut():
    with pytest.raises(DataError, match=r"d.jsonl, line 7: a token lies across the edge of an answer"):
        encode(sentence_piece(), Completion("The qui", "ck brown"))


def test_tokenizers_that_begin_every_text_with_a_space():
    tokenizer = sentence_piece(CHATML)
    [tokens] = encode(tokenizer, Conversation(TURNS))
    assert "I am fine." in learnt(tokenizer, tokens)
    assert "Hello" not in learnt(tokenizer, tokens)
    [tokens] = encode(sentence_piece(), Completion("The lazy", " dog"))
    assert learnt(tokenizer, tokens).strip() == "dog</s>"


@given(
    turns=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=2, max_size=6),
    template=st.sampled_from([CHATML, MARKED, None]),
)
@settings(deadline=None, max_examples=150)
def test_no_token_is_lost_and_only_answers_are_learnt(turns, template):
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    tokenizer = BYTES[template]
    [tokens] = encode(tokenizer, Conversation(messages))
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    plain = learnt(tokenizer, tokens)
    end = "</s>" if template is None else "<|im_end|>"
    between = "\n" if template == CHATML else ""
    before = " " if template is None else ""
    assert plain == "".join(before + answer + end + between for answer in answers)
