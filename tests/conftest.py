"""For all tests, before anything is computed."""

import os

from lohan.amx import avoid_unusable_amx

# MKL's kernels may round differently where memory is aligned differently, depending on the CPU: seen with mixtral and
# gpt-oss, whose small matmuls then differ from plain PyTorch in the last bit. AUTO makes them independent of alignment.
# MKL reads it at its first call, and processes that tests start inherit it.
os.environ.setdefault("MKL_CBWR", "AUTO")

# Tests that are about plain torch may not import lohan before their first matmul.
avoid_unusable_amx()
