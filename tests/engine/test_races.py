"""The same parity with random delays on every lane and late I/O. Longer: lohan.testing.campaign races --seeds 200."""

import random
from dataclasses import replace

import pytest

from lohan.testing import parity


@pytest.mark.parametrize("seed", range(20))
def test_delays_on_every_lane_change_no_bit(seed, models, folder_in_memory):
    case = replace(parity.random_case(random.Random(f"races {seed}")), device="virtual")
    found = parity.race_case(case, models, folder_in_memory, seed=seed, steps=3, max_delay_seconds=0.003)
    assert found is None, f"{case}: {found}"
