import pytest
from pretend import PretendDevice

from unskew.data import augment


@pytest.fixture
def home():
    """A pretended device for one test, on which nothing is left behind: the one that refuses most.

    What works there works on a pretended cuda:0; ``each_home`` runs on both.
    """
    with PretendDevice("mps:0") as device:
        yield device
    augment._sources.cache_clear()


@pytest.fixture(params=["cuda:0", "mps:0"])
def each_home(request):
    """Each pretended device in turn."""
    with PretendDevice(request.param) as device:
        yield device
    augment._sources.cache_clear()
