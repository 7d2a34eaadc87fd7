"""Tokenizers small enough to make in a moment, and chat templates that behave and misbehave."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is two plus two? It is four, and so on.",
    "user assistant system Hello there! How are you today?\n\nI am fine, thank you.   Yes.",
] * 20
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # like Qwen3's: only the last answer shows that there was (no) thinking
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORCED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""Its prompt goes on with something that no answer has."""

STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role here') }}{% endif %}" + CHATML


def byte_level(template: str | None = None, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """Like GPT-2's and Llama 3's: merges over bytes, a space belongs to the word behind it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return _wrapped(inner, template, bos)


def sentence_piece(template: str | None = None, *, bos: bool = True) -> PreTrainedTokenizerFast:
    """Like Llama 2's: every text begins with a space of its own."""
    inner = Tokenizer(models.BPE(byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False))
    return _wrapped(inner, template, bos)


def _wrapped(inner: Tokenizer, template: str | None, bos: bool) -> PreTrainedTokenizerFast:
    if bos:
        from tokenizers.processors import TemplateProcessing

        inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer
