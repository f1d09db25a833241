import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# the same examples every time, and no complaint about a machine that is busy
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("steady")

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder with the real image sets, for the tests that want them: UNSKEW_TEST_DATA names it."""
    folder = os.environ.get("UNSKEW_TEST_DATA")
    if not folder:
        pytest.skip("needs real image sets: set UNSKEW_TEST_DATA to a folder that holds them")
    return Path(folder)


@pytest.fixture(autouse=True)
def quiet_surroundings(monkeypatch):
    """No test sees the data folder of whoever runs it."""
    monkeypatch.delenv("UNSKEW_DATA", raising=False)
