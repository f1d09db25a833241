import pytest
from pretend import PretendDevice

from unskew.data import augment


@pytest.fixture(params=["cuda:0", "mps:0"])
def home(request):
    """A pretended device for one test, on which nothing is left behind."""
    with PretendDevice(request.param) as device:
        yield device
    augment._sources.cache_clear()
