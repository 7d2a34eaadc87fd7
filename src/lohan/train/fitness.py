"""Whether a model has room for the data: its positions and its vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lohan.errors import ConfigError
from lohan.train.config import TrainConfig


def check_model(folder: Path, config: TrainConfig, *, max_token: int | None = None, longest: int | None = None) -> None:
    """Refuse tokens and positions the model does not have. Without `max_token`, only what the config itself says."""
    from lohan.models.skeleton import read_config

    model: Any = read_config(folder, trust_remote_code=config.trust_remote_code).get_text_config()
    positions = getattr(model, "max_position_embeddings", None)
    # Rows that are packed may be filled up with as many tokens as a row has.
    needed = config.max_length if config.packing else longest
    if isinstance(positions, int) and positions > 0 and needed is not None and needed > positions:
        raise ConfigError(
            f"max_length is {config.max_length} and the model has {positions} positions. Set max_length: {positions}."
        )
    words = getattr(model, "vocab_size", None)
    if isinstance(words, int) and max_token is not None and max_token >= words:
        raise ConfigError(
            f"The tokenizer gives token {max_token} and the model has {words}: they do not belong together. Use the "
            "model's own tokenizer, or enlarge the model with transformers' resize_token_embeddings."
        )
