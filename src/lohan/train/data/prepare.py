"""From files to tokens on disk: read, checked, tokenised and counted in one pass, in memory that does not grow.

What is there already for the same content, tokenizer and settings is used again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from lohan.errors import DataError
from lohan.train.data.cache import FORMAT_VERSION, Counts, TokenArrays, Writer, new_folder, open_arrays
from lohan.train.data.encode import Encoder, Tokens
from lohan.train.data.files import Reader, open_reader
from lohan.train.data.shapes import Example, find_shape, read_example
from lohan.train.data.tables import folder_bytes

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all."""

_BATCH_EXAMPLES = 128
_BATCH_CHARS = 1 << 20
"""Tokenised together: enough for all cores, little beside the tokenizer itself. Picked by feel."""

_SEEN_FILE = "seen.json"
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """What tokenising depends on besides the files and the tokenizer."""

    max_length: int
    dataset_format: str = "auto"
    dataset_text_field: str = "text"
    assistant_only_loss: bool = True
    apply_chat_template: bool = True


def tokenise(
    files: Sequence[str | Path], tokenizer: Any, settings: DataSettings, cache: Path, progress: Progress | None = None
) -> TokenArrays:
    """All examples of these files as tokens, from the cache if they are there."""
    paths = [Path(file) for file in files]
    readers = [open_reader(path) for path in paths]  # all are looked at before the first is read
    seen = _read_seen(cache)
    key = _key(paths, tokenizer, settings, seen)
    if (arrays := open_arrays(cache, key)) is not None:
        _write_seen(cache, seen)
        return arrays
    with new_folder(cache, key) as folder, Writer(folder) as writer:
        counts = _write(readers, Encoder(
            tokenizer, answers_only=settings.assistant_only_loss, use_template=settings.apply_chat_template
        ), settings, writer, progress)  # fmt: skip
        _check_counts(counts, paths, settings)
        writer.finish(counts)
    _write_seen(cache, seen)
    found = open_arrays(cache, key)
    if found is None:
        raise DataError(f"{cache / key} was written and cannot be read back. Check the drive it is on.")
    return found


def _write(
    readers: Sequence[Reader], encoder: Encoder, settings: DataSettings, writer: Writer, progress: Progress | None
) -> Counts:
    counts = Counts()
    total = sum(folder_bytes(reader.path) for reader in readers)
    examples = chain.from_iterable(_examples(reader, settings, counts) for reader in readers)
    for batch in _batches(examples):
        for found, (_, _, record) in zip(encoder.encode([one[:2] for one in batch]), batch, strict=True):
            _keep(found, record, settings.max_length, writer, counts)
        counts.ended = encoder.num_ended
        if progress is not None:
            progress(sum(reader.done_bytes for reader in readers), total)
    return counts


def _examples(reader: Reader, settings: DataSettings, counts: Counts) -> Iterator[tuple[str, Example, int]]:
    """Examples that are not empty, with their place and the hash of their record."""
    field = settings.dataset_text_field
    shape = None if settings.dataset_format == "auto" else settings.dataset_format
    for number, record in reader:
        place = reader.place(number)
        if shape is None:
            shape = find_shape(record, field, place)
        counts.records += 1
        example = read_example(record, shape, field, place)
        if example is None:
            counts.empty += 1
        else:
            told = json.dumps(asdict(example), sort_keys=True, default=str)
            yield place, example, xxhash.xxh3_64_intdigest(told.encode())


def _batches(examples: Iterator[tuple[str, Example, int]]) -> Iterator[list[tuple[str, Example, int]]]:
    batch: list[tuple[str, Example, int]] = []
    size = 0
    for one in examples:
        batch.append(one)
        size += one[1].num_chars
        if len(batch) >= _BATCH_EXAMPLES or size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _keep(found: list[Tokens], record: int, max_length: int, writer: Writer, counts: Counts) -> None:
    kept = 0
    for tokens in found:
        excess = len(tokens.ids) - max_length
        if excess > 0:
            counts.truncated += 1
            counts.cut_tokens += excess
            tokens = Tokens(tokens.ids[:max_length], tokens.learnt[:max_length])
        num_labels = int(tokens.learnt.sum())
        if num_labels == 0:
            counts.without_label += 1
            continue
        writer.append(tokens, record)
        kept += 1
        counts.examples += 1
        counts.tokens += len(tokens.ids)
        counts.labels += num_labels
        counts.longest = max(counts.longest, len(tokens.ids))
        counts.max_token = max(counts.max_token, int(tokens.ids.max()))
    counts.without_label += not found
    counts.split += len(found) > 1


def _check_counts(counts: Counts, paths: Sequence[Path], settings: DataSettings) -> None:
    if counts.examples:
        return
    named = ", ".join(str(path) for path in paths)
    if not counts.records:
        raise DataError(f"{named}: there are no examples. Name a file that has some in train_file and eval_file.")
    why = f"{counts.empty:,} are empty and {counts.without_label:,} have nothing to learn"
    fix = (
        f"Raise max_length (now {settings.max_length}): the answers are cut off."
        if counts.truncated
        else "Check that answers are there, with the role assistant."
    )
    raise DataError(f"{named}: none of the {counts.records:,} examples can be learnt from: {why}. {fix}")


# -- what the result depends on ---------------------------------------------------------------------------


def _key(paths: Sequence[Path], tokenizer: Any, settings: DataSettings, seen: dict[str, str]) -> str:
    hasher = xxhash.xxh3_128()
    for path in paths:
        hasher.update(f"{path.suffix.lower()} {_content(path, seen)}\n".encode())
    hasher.update(tokenizer_fingerprint(tokenizer).encode())
    hasher.update(json.dumps([FORMAT_VERSION, asdict(settings)], sort_keys=True).encode())
    return str(hasher.hexdigest())


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of all of a tokenizer that can change what it gives."""
    hasher = xxhash.xxh3_128()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    for part in (type(tokenizer).__name__, described, json.dumps(special), json.dumps(tokenizer.chat_template)):
        hasher.update(part.encode())
        hasher.update(b"\0")
    return str(hasher.hexdigest())


def _content(path: Path, seen: dict[str, str]) -> str:
    """The hash of a file's or folder's content. One that was seen and has not changed is not read again."""
    try:
        parts = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        stamps = [(str(part.relative_to(path)), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
        stamp = xxhash.xxh3_128_hexdigest(json.dumps([str(path.resolve()), stamps]).encode())
        if stamp not in seen:
            hasher = xxhash.xxh3_128()
            for part in parts:
                hasher.update(f"{part.relative_to(path)}\n".encode())
                with open(part, "rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        hasher.update(chunk)
            seen[stamp] = hasher.hexdigest()
        return seen[stamp]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Correct that, or name another file.") from None


def _read_seen(cache: Path) -> dict[str, str]:
    try:
        seen = json.loads((cache / _SEEN_FILE).read_text(encoding="utf-8"))
        return {str(stamp): str(content) for stamp, content in seen.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _write_seen(cache: Path, seen: dict[str, str]) -> None:
    """Only a memory aid: where it cannot be written, files are read again."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        new = cache / f".{_SEEN_FILE}.{os.getpid()}"
        new.write_text(json.dumps(seen), encoding="utf-8")
        new.replace(cache / _SEEN_FILE)
    except OSError:
        pass
