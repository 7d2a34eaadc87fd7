"""Text from a model of any size, from a run or a Hugging Face folder, with weights streamed where they do not fit.

with open_generator("my-run/model", memory="8GB") as generator:
    written = generator.write("What is two plus two?", Sampling(max_new_tokens=50), show=print)
"""

from __future__ import annotations

from lohan.generate.generator import Generator, Sampling, Written, open_generator

__all__ = ["Generator", "Sampling", "Written", "open_generator"]
