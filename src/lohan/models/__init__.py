"""From nn.Module to units that can be streamed; Hugging Face folders in and out."""

from __future__ import annotations
