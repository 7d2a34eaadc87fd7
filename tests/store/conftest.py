import pytest
from store_bench import Bench


@pytest.fixture
def bench():
    return Bench()
