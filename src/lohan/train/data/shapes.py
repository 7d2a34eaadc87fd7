"""What an example is: a conversation, a prompt with its completion, or a text.

Five shapes of records are known, by the names people use for them; a file's shape is told from the keys of its first
record. Keys that are null count as absent, because tables cannot leave one out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lohan.errors import DataError
from lohan.nearest import did_you_mean
from lohan.train.data.files import Record

KEYS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
"""The keys each shape must have, in the order they are looked for. `text` has the one of dataset_text_field."""

_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
"""Who speaks in sharegpt's `from`."""

_ROLES = ("user", "assistant", "system", "developer", "tool", "function", "ipython", "observation")
"""What chat templates know."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    learn_from: int = 0
    """Assistant messages before this one are not learnt: they belong to a prompt."""

    @property
    def num_chars(self) -> int:
        return sum(len(message["content"] or "") for message in self.messages)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what follows it, both plain text."""

    prompt: str
    completion: str

    @property
    def num_chars(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True)
class Text:
    text: str

    @property
    def num_chars(self) -> int:
        return len(self.text)


Example = Conversation | Completion | Text


def find_shape(record: Record, text_field: str, place: str) -> str:
    """The shape of a record, by its keys."""
    keys = [key for key, value in record.items() if value is not None]
    for shape, needed in KEYS.items():
        if all(key in keys for key in needed):
            return shape
    if text_field in keys:
        return "text"
    wanted = [" and ".join(needed) for needed in KEYS.values()] + [text_field]
    raise DataError(
        f"{place}: an example needs the keys {', or '.join(wanted)}; "
        f"this one has {', '.join(map(str, keys)) or 'none'}. Rename them, or set dataset_text_field."
    )


def read_example(record: Record, shape: str, text_field: str, place: str) -> Example | None:
    """The example in a record; None if it is empty. DataError names the place of what does not fit the shape."""
    if shape == "text":
        text = _text(record, text_field, place)
        return Text(text) if text else None
    if shape == "prompt-completion":
        return _prompt_completion(record, place)
    if shape == "alpaca":
        return _alpaca(record, place)
    key = KEYS[shape][0]
    messages = _messages(_get(record, key, place), key, place)
    return Conversation(messages, _tools(record, place)) if messages else None


def _prompt_completion(record: Record, place: str) -> Example | None:
    prompt, completion = _get(record, "prompt", place), _get(record, "completion", place)
    if isinstance(prompt, list) or isinstance(completion, list):
        for key, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, list):
                raise DataError(f"{place}: prompt and completion must both be text or both messages; {key} is not.")
        asked, answered = _messages(prompt, "prompt", place), _messages(completion, "completion", place)
        if not answered:
            return None
        return Conversation([*asked, *answered], _tools(record, place), learn_from=len(asked))
    text = _text(record, "completion", place)
    return Completion(_text(record, "prompt", place), text) if text else None


def _alpaca(record: Record, place: str) -> Example | None:
    output = _text(record, "output", place)
    if not output:
        return None
    asked = _text(record, "instruction", place)
    if record.get("input"):
        asked = f"{asked}\n\n{_text(record, 'input', place)}"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": _text(record, "system", place)})
    return Conversation(messages)


def _messages(value: Any, key: str, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise DataError(f"{place}: {key} must be a list of messages, and it is {_told(value)}.")
    return [_message(message, f"{place}: message {index} of {key}") for index, message in enumerate(value, 1)]


def _message(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{place} must be an object like {{"role": "user", "content": "..."}}, not {_told(value)}.')
    message = {name: part for name, part in value.items() if part is not None}
    if "from" in message and "role" not in message:
        speaker = message.pop("from")
        role = _SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            raise DataError(f"{place} is from {speaker!r}. Known are: {', '.join(_SPEAKERS)}.")
        message["role"] = role
        if "value" in message:
            message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{place} has no role. Write user, assistant, system or tool in it.")
    if role not in _ROLES:
        # A misspelt assistant would be taken for a question, and its answer never learnt.
        known = _SPEAKERS.get(role.lower())
        hint = f" Here it is called {known}." if known else did_you_mean(role, _ROLES)
        raise DataError(f"{place} has the role {role!r}.{hint} Write one of: {', '.join(_ROLES)}.")
    if "content" not in message:
        if not message.get("tool_calls"):
            raise DataError(f'{place} has no content. Write "content": "..." in it.')
        message["content"] = None  # what calls a tool need not say anything
        return message
    message["content"] = _content(message["content"], place)
    return message


def _content(value: Any, place: str) -> str:
    """The text of a message; a list of text parts is joined."""
    if isinstance(value, list):
        parts = []
        for part in value:
            kind = part.get("type", "text") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(f"{place} has a part of type {kind!r}. Only text can be learnt: remove it.")
            parts.append(part["text"])
        value = "".join(parts)
    if not isinstance(value, str):
        raise DataError(f"{place} has a content that is not text: {_told(value)}.")
    _check_unicode(value, place)
    return value


def _tools(record: Record, place: str) -> list[Any] | None:
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place}: tools must be a list of function descriptions, and it is {_told(tools)}.")
    return tools or None


def _get(record: Record, key: str, place: str) -> Any:
    value = record.get(key)
    if value is None:
        there = [name for name in record if isinstance(name, str) and record[name] is not None]
        hint = did_you_mean(key, there)
        raise DataError(
            f"{place}: there is no {key}.{hint} Its keys are {', '.join(there) or 'none'}. All examples of a file have "
            "the shape of its first: add what is missing, or move it to a file of its own."
        )
    return value


def _text(record: Record, key: str, place: str) -> str:
    value = _get(record, key, place)
    if not isinstance(value, str):
        raise DataError(f"{place}: {key} must be text, and it is {_told(value)}.")
    _check_unicode(value, f"{place}: {key}")
    return value


def _check_unicode(text: str, place: str) -> None:
    """JSON can spell half a character (\\ud800), and no tokenizer takes it."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} has half a character at {error.start + 1} ({text[error.start]!a}). Write the file again as UTF-8."
        ) from None


def _told(value: Any) -> str:
    words = repr(value)
    return f"{type(value).__name__} {words if len(words) <= 40 else words[:37] + '...'}"
