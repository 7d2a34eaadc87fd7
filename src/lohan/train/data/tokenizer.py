"""A model folder's tokenizer, with the chat template a config asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lohan.errors import ConfigError, ModelError


def load_tokenizer(
    folder: str | Path, *, chat_template_path: str | Path | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer in a local Hugging Face folder."""
    from transformers import AutoTokenizer

    path = Path(folder)
    if not path.is_dir():
        raise ModelError(
            f"{path} is not a folder. Set model_name_or_path to a local Hugging Face folder; "
            "a model of the Hub must be downloaded first: hf download NAME --local-dir FOLDER."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # a missing or broken file shows as anything from OSError to a Rust panic
        why = (str(error).splitlines() or [""])[0].rstrip(": .")
        raise ModelError(
            f"{path} has no tokenizer that transformers can load ({type(error).__name__}: {why}). "
            "Put the model's tokenizer.json and tokenizer_config.json there."
        ) from None
    if len(tokenizer) == 0:
        raise ModelError(f"The tokenizer in {path} is empty. Put the model's tokenizer.json there.")
    if chat_template_path is not None:
        template = Path(chat_template_path)
        try:
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise ConfigError(
                f"chat_template_path: {template} cannot be read: {reason}. Correct the path, or remove the key to use "
                "the tokenizer's own template."
            ) from None
    return tokenizer


def pad_token(tokenizer: Any) -> int:
    """What fills rows up. It is never looked at, so any token will do where the tokenizer names none."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
