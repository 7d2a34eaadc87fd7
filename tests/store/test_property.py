import pytest

from lohan.testing import machine


@pytest.mark.timeout(600)
def test_random_lives_of_a_store_with_crashes_power_losses_and_failures_match_a_model_of_dicts():
    machine.run(500)
