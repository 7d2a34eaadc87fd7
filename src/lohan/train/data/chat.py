"""Conversations as the text a model sees, and where in it the answers are.

Where the chat template marks what it generates ({% generation %}), the marks say it. Where it does not, the template is
asked: the conversation up to an answer, with the prompt for one, must be the beginning of the conversation with the
answer. What lies between the two ends is the answer with its end-of-turn mark, exactly what a model will be asked to
write. Templates that show an earlier answer differently from the last one (thinking is dropped from it) break the
second half of this rule; such a conversation becomes one example per answer, each as the model would meet it. Where
the first half breaks, nothing sound can be said, and the example is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lohan.errors import DataError
from lohan.train.data.shapes import Conversation

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant:{% generation %} {{ message['content'] }}{{ eos_token }}"
    "{% endgeneration %}{{ '\\n\\n' if not loop.last }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] }}\n\n"
    "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For tokenizers without a template: `User: ...`, a blank line, `Assistant: ...` and the end-of-text token."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text, and the parts of it that are learnt: [start, end) in characters, in order, not touching."""

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template, or the plain one where it has none."""

    def __init__(self, tokenizer: Any, *, answers_only: bool):
        self._tokenizer = tokenizer
        self._answers_only = answers_only
        self._special = dict(tokenizer.special_tokens_map)
        self.has_template = bool(tokenizer.chat_template)

    def render(self, conversation: Conversation, place: str) -> list[Rendered]:
        """The conversation as one text, or as one per answer; none if it has no answer to learn."""
        messages, first = conversation.messages, conversation.learn_from
        template = self._template(conversation)
        if not self._answers_only:
            text = self._text(template, conversation, messages, place)
            return [Rendered(text, ((0, len(text)),))]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not answers:
            return []
        messages = messages[: answers[-1] + 1]  # nothing is learnt from what follows the last answer
        if _MARKS.search(template):
            return self._by_marks(template, conversation, messages, first, place)
        return self._by_prefixes(template, conversation, messages, answers, place)

    def _template(self, conversation: Conversation) -> str:
        if not self.has_template:
            return PLAIN_TEMPLATE
        return str(self._tokenizer.get_chat_template(tools=conversation.tools))

    def _by_marks(
        self, template: str, conversation: Conversation, messages: list[dict[str, Any]], first: int, place: str
    ) -> list[Rendered]:
        text, spans = self._render(template, conversation, messages, place, marks=True)
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) == len(assistants):
            spans = [span for span, index in zip(spans, assistants, strict=True) if index >= first]
        elif first:
            raise DataError(
                f"{place}: the chat template marks {len(spans)} answers in a conversation with {len(assistants)}, so "
                "the prompt's cannot be told from the completion's. Write it as messages, which learns all answers."
            )
        return [Rendered(text, _joined(spans))] if any(start < end for start, end in spans) else []

    def _by_prefixes(
        self, template: str, conversation: Conversation, messages: list[dict[str, Any]], answers: list[int], place: str
    ) -> list[Rendered]:
        prompts, wholes = [], []
        for index in answers:
            prompt = self._text(template, conversation, messages[:index], place, prompt=True)
            whole = self._text(template, conversation, messages[: index + 1], place)
            if not whole.startswith(prompt):
                raise DataError(
                    f"{place}: the chat template ends the prompt for answer {index + 1} with {_tail(prompt)} and does "
                    "not go on from there with the answer, so where it begins cannot be told. Give a template with "
                    "{% generation %} marks in chat_template_path, or use the shape prompt-completion with "
                    "apply_chat_template: false."
                )
            prompts.append(prompt)
            wholes.append(whole)
        text = wholes[-1]
        if all(text.startswith(part) for part in (*prompts, *wholes)):
            spans = [(len(prompt), len(whole)) for prompt, whole in zip(prompts, wholes, strict=True)]
            return [Rendered(text, _joined(spans))]
        return [Rendered(whole, ((len(prompt), len(whole)),)) for prompt, whole in zip(prompts, wholes, strict=True)]

    def _text(
        self,
        template: str,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        place: str,
        *,
        prompt: bool = False,
    ) -> str:
        return self._render(template, conversation, messages, place, prompt=prompt)[0]

    def _render(
        self,
        template: str,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        place: str,
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        def render(shown: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
            texts, spans = render_jinja_template(
                conversations=[shown],
                tools=conversation.tools,
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self._special,
            )
            return texts[0], [tuple(span) for span in spans[0]] if marks else []

        try:
            try:
                return render(messages)
            except Exception:  # a template is a program of somebody else's: it can fail in any way
                if all(message["content"] is not None for message in messages):
                    raise
                # Some templates want null where a message only calls a tool, others an empty text.
                return render([{**message, "content": message["content"] or ""} for message in messages])
        except Exception as error:
            raise DataError(
                f"{place}: the chat template refuses this conversation: "
                f"{(str(error) or type(error).__name__).rstrip('.')}. "
                "Change the conversation, or give another template in chat_template_path."
            ) from None


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans in order, empty ones left out, touching ones made one."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if start >= end:
            continue
        if joined and joined[-1][1] >= start:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def _tail(text: str) -> str:
    return repr(text if len(text) <= 40 else "..." + text[-37:])
