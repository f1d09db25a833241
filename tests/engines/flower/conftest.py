import pytest

from nodes import first_state
from unskew.round import statistics


@pytest.fixture(scope="session")
def shared():
    """What the server sends with the first round's jobs."""
    return statistics.build_shared(first_state())
