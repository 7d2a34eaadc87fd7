"""Examples out of text files, one at a time, each with the line it begins in.

A reader holds one example and one buffer, whatever the size of the file. What cannot be read raises DataError with the
file and the line. Parquet files and `datasets` folders are in tables.py.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from lohan.errors import DataError
from lohan.nearest import did_you_mean

Record = dict[str, Any]
_SPACE = re.compile(r"[ \t\r\n]*")
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar")
_CHUNK_BYTES = 1 << 20
_MAX_ELEMENT_CHARS = 64 << 20
"""An element of a JSON list that is longer is taken for a list that is broken."""


class Reader(Protocol):
    """A file of examples."""

    path: Path
    done_bytes: int
    """How much has been read, for progress."""

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        """Examples with their number: a line for text files, a row for tables."""

    def place(self, number: int) -> str:
        """The name of an example for people."""


def open_reader(path: Path) -> Reader:
    """A reader for this file or folder, by its name."""
    if not path.exists():
        raise DataError(f"{path} does not exist. Check train_file and eval_file.")
    if not path.is_dir() and not path.is_file():
        raise DataError(f"{path} is not a file: it is read more than once. Write its content to a file.")
    if path.is_dir():
        from lohan.train.data.tables import DatasetFolder

        return DatasetFolder(path)
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson", ".jsonlines"):
        return JsonLines(path)
    if suffix == ".json":
        return JsonLines(path) if _first_character(path) == "{" else JsonList(path)
    if suffix in (".csv", ".tsv"):
        return Csv(path, delimiter="," if suffix == ".csv" else "\t")
    if suffix in (".parquet", ".pq"):
        from lohan.train.data.tables import Parquet

        return Parquet(path)
    known = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
    hint = " Unpack it first." if suffix in _PACKED else did_you_mean(suffix, known) if suffix else ""
    raise DataError(
        f"{path} has an unknown ending.{hint} Files of examples end in "
        f"{', '.join(known)}, or are a folder written by datasets' save_to_disk."
    )


def _first_character(path: Path) -> str:
    with _open(path) as file:
        while chunk := file.read(4096):
            text = chunk.removeprefix(codecs.BOM_UTF8).lstrip()
            if text:
                return chr(text[0])
    return ""


def _open(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path} cannot be opened: {error.strerror}. Correct that, or name another file.") from None


class _TextFile:
    def __init__(self, path: Path):
        self.path = path
        self.done_bytes = 0

    def place(self, number: int) -> str:
        return f"{self.path}, line {number}"

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Lines as text with their numbers, from 1; the ends of lines stay."""
        with _open(self.path) as file:
            for number, raw in enumerate(file, 1):
                self.done_bytes += len(raw)
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                try:
                    yield number, raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{self.place(number)}: byte {error.start + 1} of the line is not UTF-8. "
                        f"Save the file as UTF-8."
                    ) from None


class JsonLines(_TextFile):
    """One JSON object per line; blank lines are passed over."""

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        for number, line in self._lines():
            line = line.rstrip()
            if not line:
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{self.place(number)}: this is not JSON: {_reason(error)} at character {error.pos + 1}. "
                    "Every line must be one whole object."
                ) from None
            except RecursionError:
                raise DataError(f"{self.place(number)}: this JSON is nested too deeply. Remove the line.") from None
            yield number, _checked(value, self.place(number))


class JsonList(_TextFile):
    """One JSON list of objects, read element by element."""

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        text = _Window(self)
        try:
            yield from self._elements(text)
        finally:
            text.close()

    def _elements(self, text: _Window) -> Iterator[tuple[int, Record]]:
        decoder = json.JSONDecoder()
        if text.skip_space() != "[":
            raise DataError(f"{self.place(text.line)}: a list of objects was expected: [{{...}}, {{...}}].")
        text.take(1)
        if text.skip_space() == "]":
            text.take(1)
        else:
            while True:
                text.skip_space()
                number = text.line
                value, length = self._element(decoder, text)
                text.take(length)
                yield number, _checked(value, self.place(number))
                found = text.skip_space()
                if found not in (",", "]"):
                    what = "the file ends inside the list" if not found else f"{found!r} stands between two examples"
                    raise DataError(f"{self.place(text.line)}: {what}. A comma or ] was expected.")
                text.take(1)
                if found == "]":
                    break
        if text.skip_space():
            raise DataError(f"{self.place(text.line)}: something follows the list. One file holds one list.")

    def _element(self, decoder: json.JSONDecoder, text: _Window) -> tuple[Any, int]:
        while True:
            try:
                value, end = decoder.raw_decode(text.text, text.at)
                return value, end - text.at
            except json.JSONDecodeError as error:
                # It may only be cut off by the window's edge. The window grows by more each time: linear in all.
                if text.left > _MAX_ELEMENT_CHARS or not text.more(3 * text.left):
                    line = text.line + text.text.count("\n", text.at, error.pos)
                    raise DataError(
                        f"{self.place(line)}: this is not JSON: {_reason(error)}. Write the file again: it must be one "
                        "whole list of objects."
                    ) from None
            except RecursionError:
                raise DataError(f"{self.place(text.line)}: this JSON is nested too deeply. Remove it.") from None


class _Window:
    """The part of a text file that is being looked at, from `at` on."""

    def __init__(self, source: JsonList):
        self._source = source
        self._file = _open(source.path)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text = ""
        self.at = 0
        self.line = 1

    @property
    def left(self) -> int:
        return len(self.text) - self.at

    def more(self, num_bytes: int = _CHUNK_BYTES) -> bool:
        """Let go of what was taken and read on; False at the end of the file."""
        if self._file.closed:
            return False
        chunk = self._file.read(max(num_bytes, _CHUNK_BYTES))
        self._source.done_bytes += len(chunk)
        try:
            decoded = self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n", self.at) + error.object[: error.start].count(b"\n")
            raise DataError(f"{self._source.place(line)}: this is not UTF-8. Save the file as UTF-8.") from None
        self.text, self.at = self.text[self.at :] + decoded, 0
        if not chunk:
            self._file.close()
        return bool(chunk)

    def close(self) -> None:
        self._file.close()

    def take(self, num_characters: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + num_characters)
        self.at += num_characters

    def skip_space(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.take(match.end() - self.at if match else 0)
            if self.left or not self.more():
                return self.text[self.at : self.at + 1]


class Csv(_TextFile):
    """A table with a line of names on top; every value is text."""

    def __init__(self, path: Path, *, delimiter: str):
        super().__init__(path)
        self._delimiter = delimiter

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        # The csv module has one limit for the whole process, 128 kB, and texts are longer.
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
        rows = csv.reader((line for _, line in self._lines()), delimiter=self._delimiter, strict=True)
        names: list[str] | None = None
        number = 1
        while True:
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise DataError(
                    f"{self.place(number)}: this is not CSV: {error}. A quote that is opened must be closed, and one "
                    'inside a value is written twice: "".'
                ) from None
            if row is None:
                return
            if names is None:
                names = row
                if len(set(names)) < len(names) or not all(names):
                    raise DataError(f"{self.place(1)}: the names of the columns must be there, each once: {names}.")
            elif row:
                if len(row) != len(names):
                    raise DataError(
                        f"{self.place(number)}: {len(row)} values and {len(names)} columns. "
                        'A value with a comma or a line break in it needs "quotes".'
                    )
                yield number, dict(zip(names, row, strict=True))
            number = rows.line_num + 1


def _reason(error: json.JSONDecodeError) -> str:
    return error.msg.removesuffix(" at")  # some of Python's messages already lead to the place


def _checked(value: Any, place: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(f'{place}: an example must be an object, like {{"text": "..."}}, and this is {_kind(value)}.')
    return value


def _kind(value: Any) -> str:
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
