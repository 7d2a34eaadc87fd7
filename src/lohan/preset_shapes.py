"""The shapes behind the presets: the published GPTs, and open models by their public config.json (read by 2026-11).

The published results give the shapes of 13B and 175B. The others follow from the sizes the source gives (12 x layers x
hidden^2 plus embeddings: 64.8e9 for "70B") and the usual GPT-3 proportions of 128 per head; 6B and 1.55B are the
shapes of GPT-J and GPT-2 XL.
"""

from __future__ import annotations

from lohan.presets import Shape, gpt

_GPT = {
    "gpt-1.55b": gpt(48, 25, 1600),
    "gpt-6b": gpt(28, 32, 4096),
    "gpt-13b": gpt(40, 40, 5120),
    "gpt-30b": gpt(48, 56, 7168),
    "gpt-70b": gpt(80, 64, 8192),
    "gpt-135b": gpt(88, 88, 11264),
    "gpt-175b": gpt(96, 96, 12288),
    "gpt-276b": gpt(112, 112, 14336),
    "gpt-412b": gpt(128, 128, 16384),
}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool = False) -> Shape:
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_size=128 if hidden > 2048 else 64,
        intermediate=intermediate, vocabulary=128256, tied=tied,
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int, *, tied: bool = False) -> Shape:
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_size=128, intermediate=intermediate,
        vocabulary=151936, tied=tied, query_norm=True,
    )  # fmt: skip


def _gemma3(layers: int, hidden: int, heads: int, kv_heads: int, head_size: int, intermediate: int) -> Shape:
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_size=head_size, intermediate=intermediate,
        vocabulary=262208, tied=True, norms_per_block=4, query_norm=True, window=1024, full_attention_every=6,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> Shape:
    return Shape(
        layers=layers, hidden=2880, heads=64, kv_heads=8, head_size=64, intermediate=2880, vocabulary=201088,
        biases=True, experts=experts, experts_per_token=4, window=128, full_attention_every=2, sinks=True,
    )  # fmt: skip


_OPEN = {
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, tied=True),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": Shape(
        layers=48, hidden=2048, heads=32, kv_heads=4, head_size=128, intermediate=768, vocabulary=151936,
        query_norm=True, experts=128, experts_per_token=8,
    ),
    "mistral-7b": Shape(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, intermediate=14336, vocabulary=32768
    ),
    "mixtral-8x7b": Shape(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, intermediate=14336, vocabulary=32000, experts=8,
        experts_per_token=2,
    ),
    "gemma-3-1b": Shape(
        layers=26, hidden=1152, heads=4, kv_heads=1, head_size=256, intermediate=6912, vocabulary=262144, tied=True,
        norms_per_block=4, query_norm=True, window=512, full_attention_every=6,
    ),
    "gemma-3-4b": _gemma3(34, 2560, 8, 4, 256, 10240),
    "gemma-3-12b": _gemma3(48, 3840, 16, 8, 256, 15360),
    "gemma-3-27b": _gemma3(62, 5376, 32, 16, 128, 21504),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "phi-3-mini": Shape(
        layers=32, hidden=3072, heads=32, kv_heads=32, head_size=96, intermediate=8192, vocabulary=32064
    ),
    "phi-3-medium": Shape(
        layers=40, hidden=5120, heads=40, kv_heads=10, head_size=128, intermediate=17920, vocabulary=32064
    ),
}  # fmt: skip

SHAPES: dict[str, Shape] = {**_GPT, **_OPEN}
