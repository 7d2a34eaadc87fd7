"""Text from tokens, handed on as soon as it can no longer change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class LiveText:
    """What transformers' generate() takes as streamer. Half a character waits for its other half."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]):
        self._tokenizer, self._show = tokenizer, show
        self._tokens: list[int] = []
        self._shown = 0
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """The prompt first, then one token at a time."""
        if self._prompt:
            self._prompt = False
            return
        self._tokens += value.flatten().tolist()
        self._show_new(final=False)

    def end(self) -> None:
        self._show_new(final=True)
        self._tokens, self._shown, self._prompt = [], 0, True

    def _show_new(self, *, final: bool) -> None:
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if text.endswith("\ufffd") and not final:
            return
        if text[self._shown :]:
            self._show(text[self._shown :])
        self._shown = len(text)
        if text.endswith("\n"):  # what follows a line break does not depend on what was before it
            self._tokens, self._shown = [], 0
