"""How fast are conversations tokenised, and in how much memory?

    python benchmarks/tokenise.py --examples 100000 --directory DIR [--tokenizer MODEL_FOLDER]

Writes so many conversations of about 2 kB as JSONL (one question, one answer, a chat template without generation
marks, so every prompt is tokenised twice), then tokenises them once into an empty cache. Without --tokenizer, a
byte-level one of 32,768 tokens is made by itself. Prints rate and peak resident memory of the process, beside what it
had when the tokenizer was loaded; the last line of output is the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile
import time
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 32_768


def words(num: int) -> list[str]:
    """Made-up words, short ones first, as languages have them."""
    source = random.Random(0)
    return ["".join(source.choices(string.ascii_lowercase, k=2 + index % 9)) for index in range(num)]


def write_conversations(path: Path, num: int, chars: int) -> None:
    source, known = random.Random(1), words(20_000)
    weights = [1 / (rank + 5) for rank in range(len(known))]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(num):
            length = source.randint(chars // 2, chars * 3 // 2)
            text = " ".join(source.choices(known, weights, k=length // 6))
            edge = text.find(" ", source.randint(0, len(text) // 2))
            said = [{"role": "user", "content": text[:edge]}, {"role": "assistant", "content": text[edge + 1 :]}]
            file.write(json.dumps({"messages": said}) + "\n")


def make_tokenizer() -> Any:
    """As large as a real one: all bytes, and made-up words as single tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary: dict[str, int] = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in words(40_000):
        for spelled in (word, "Ġ" + word):
            for end in range(2, len(spelled) + 1):
                if len(vocabulary) < VOCABULARY and spelled[:end] not in vocabulary:
                    vocabulary[spelled[:end]] = len(vocabulary)
                    merges.append((spelled[: end - 1], spelled[end - 1]))
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def peak_bytes() -> int:
    # Not ru_maxrss: what a parent had resident before exec counts into it.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(directory: Path, num_examples: int, chars: int, tokenizer_folder: str | None) -> dict[str, float]:
    from lohan.train.data.prepare import DataSettings, tokenise
    from lohan.train.data.tokenizer import load_tokenizer

    path = directory / "data.jsonl"
    write_conversations(path, num_examples, chars)
    tokenizer = make_tokenizer() if tokenizer_folder is None else load_tokenizer(tokenizer_folder)
    resting = peak_bytes()
    started = time.perf_counter()
    arrays = tokenise([path], tokenizer, DataSettings(max_length=2048), directory / "cache")
    seconds = time.perf_counter() - started
    return {
        "examples": len(arrays),
        "megabytes": path.stat().st_size / 1e6,
        "tokens": arrays.counts.tokens,
        "seconds": seconds,
        "megabytes_per_second": path.stat().st_size / 1e6 / seconds,
        "tokens_per_second": arrays.counts.tokens / seconds,
        "resting_rss_megabytes": resting / 1e6,
        "peak_rss_megabytes": peak_bytes() / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--chars", type=int, default=2000, help="of a conversation, on average")
    parser.add_argument("--directory", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--tokenizer", help="a Hugging Face folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        found = measure(Path(folder), options.examples, options.chars, options.tokenizer)
    for name, value in found.items():
        print(f"{name:24} {value:>14,.1f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
