"""Examples as tokens, with a mark on each token that is learnt.

A text is tokenised whole, and so is every beginning of it that ends where an answer begins or ends. If each beginning's
tokens are the beginning of the whole's, the answer is exactly the tokens between: nothing of the prompt is learnt,
nothing of the answer is missed, and the prompt has the tokens it will have when the model is asked. Where a token lies
across such an edge, the parts are tokenised by themselves, which is sound if they still spell the same text; if they do
not, the example is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lohan.errors import DataError
from lohan.train.data.chat import ChatRenderer, Rendered
from lohan.train.data.shapes import Completion, Conversation, Example, Text

_PROBE = "a"


@dataclass(frozen=True, slots=True)
class Tokens:
    """One example. learnt[i]: whether token i is predicted; the first one of an example never is."""

    ids: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A text to tokenise; `plain` ones get the tokenizer's first token and the end of text."""

    rendered: Rendered
    plain: bool
    example: int


class Encoder:
    """Examples to tokens, with one tokenizer."""

    def __init__(self, tokenizer: Any, *, answers_only: bool, use_template: bool):
        self._tokenizer = tokenizer
        self._answers_only = answers_only
        self._chat = ChatRenderer(tokenizer, answers_only=answers_only)
        if not use_template:
            self._chat.has_template = False
        self._first = first_tokens(tokenizer)
        self._end: int | None = tokenizer.eos_token_id
        self._marks = {*tokenizer.get_added_vocab().values(), self._end}
        self.num_ended = 0
        """Texts of a chat template that got the end-of-text token because nothing marked their end."""

    def encode(self, examples: Sequence[tuple[str, Example]]) -> list[list[Tokens]]:
        """For each (place, example) its tokens: usually one, none without an answer, several if it had to be split."""
        pieces: list[_Piece] = []
        for number, (place, example) in enumerate(examples):
            rendered, plain = self._render(example, place)
            pieces += [_Piece(each, plain, number) for each in rendered]
        texts: list[str] = []
        for piece in pieces:
            texts += [piece.rendered.text, *(piece.rendered.text[:edge] for edge in _edges(piece.rendered))]
        all_ids = iter(self._ids(texts, [place for place, _ in examples]))
        found: list[list[Tokens]] = [[] for _ in examples]
        for piece in pieces:
            whole = next(all_ids)
            beginnings = [next(all_ids) for _ in _edges(piece.rendered)]
            place = examples[piece.example][0]
            ids, learnt = self._mark(piece.rendered, whole, beginnings, place)
            found[piece.example].append(self._finish(ids, learnt, plain=piece.plain))
        return found

    def _render(self, example: Example, place: str) -> tuple[list[Rendered], bool]:
        if isinstance(example, Text):
            return [Rendered(example.text, ((0, len(example.text)),))], True
        if isinstance(example, Completion):
            if self._chat.has_template:
                asked = {"role": "user", "content": example.prompt}
                answered = {"role": "assistant", "content": example.completion}
                return self._chat.render(Conversation([asked, answered]), place), False
            text = example.prompt + example.completion
            start = len(example.prompt) if self._answers_only else 0
            return [Rendered(text, ((start, len(text)),))], True
        return self._chat.render(example, place), False

    def _ids(self, texts: list[str], places: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        try:
            found: list[list[int]] = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
            )["input_ids"]
        except Exception as error:  # what a tokenizer raises for text it cannot take is its own affair
            span = places[0] if len(places) == 1 else f"between {places[0]} and {places[-1]}"
            raise DataError(f"{span}: the tokenizer cannot read a text: {error}") from None
        return found

    def _mark(
        self, rendered: Rendered, whole: list[int], beginnings: list[list[int]], place: str
    ) -> tuple[list[int], npt.NDArray[np.bool_]]:
        edges = _edges(rendered)
        cuts = dict(zip(edges, (len(beginning) for beginning in beginnings), strict=True))
        if any(whole[: len(beginning)] != beginning for beginning in beginnings):
            whole, cuts = self._in_parts(rendered.text, edges, whole, place)
        cuts[0], cuts[len(rendered.text)] = 0, len(whole)
        learnt = np.zeros(len(whole), dtype=np.bool_)
        for start, end in rendered.answers:
            learnt[cuts[start] : cuts[end]] = True
        return whole, learnt

    def _in_parts(
        self, text: str, edges: Sequence[int], whole: list[int], place: str
    ) -> tuple[list[int], dict[int, int]]:
        """The same text with a token's edge at every edge, or DataError."""
        places = [0, *edges, len(text)]
        parts = self._ids([text[a:b] for a, b in pairwise(places)], [place])
        ids: list[int] = []
        cuts: dict[int, int] = {}
        for edge, part in zip(places[1:], parts, strict=True):
            ids += part
            cuts[edge] = len(ids)
        if self._spelled(ids) != self._spelled(whole):
            raise DataError(
                f"{place}: a token lies across the edge of an answer, and the parts by themselves spell another text "
                "with this tokenizer. Begin the answer with a word, without leading spaces or line breaks, or set "
                "assistant_only_loss: false."
            )
        return ids, cuts

    def _spelled(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _finish(self, ids: list[int], learnt: npt.NDArray[np.bool_], *, plain: bool) -> Tokens:
        if plain:
            first = [] if ids[: len(self._first)] == self._first else self._first
            end = [] if self._end is None or ids[-1:] == [self._end] else [self._end]
            ids = [*first, *ids, *end]
            learnt = np.concatenate([np.zeros(len(first), np.bool_), learnt, np.ones(len(end), np.bool_)])
        elif self._end is not None and not self._has_end(ids):
            self.num_ended += 1
            ids, learnt = [*ids, self._end], np.append(learnt, learnt[-1:])
        learnt[:1] = False  # there is nothing to predict it from
        return Tokens(np.array(ids, dtype=np.int32), learnt)

    def _has_end(self, ids: list[int]) -> bool:
        """Whether a text ends with a token that means something by itself, white space aside. Where a template writes
        none (GLM's ends an answer with the next turn), a model would never learn to stop."""
        for token in reversed(ids):
            if token in self._marks:
                return True
            if self._spelled([token]).strip():
                return False
        return True


def _edges(rendered: Rendered) -> list[int]:
    """Where answers begin and end inside the text."""
    inside = {edge for span in rendered.answers for edge in span}
    return sorted(inside - {0, len(rendered.text)})


def first_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text, usually the begin-of-text token or nothing."""
    with_special = tokenizer(_PROBE)["input_ids"]
    without = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    for start in range(len(with_special) - len(without) + 1):
        if with_special[start : start + len(without)] == without:
            return list(with_special[:start])
    return []
