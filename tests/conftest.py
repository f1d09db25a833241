import os
import signal
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
# `nohup make test &` and some CI systems start us with interrupts ignored, and programs that we start would inherit it
signal.signal(signal.SIGINT, signal.default_int_handler)


# what fails first tells most: laws and golden values, then the parts, then whole commands, then the browser
ORDER = [
    "test_architecture", "laws", "golden", "core", "round", "engines", "calibration", "privacy", "data", "models",
    "runs", "analysis", "charts", "report", "console", "loggers", "device", "test_docs", "e2e", "browser",
]  # fmt: skip


def pytest_collection_modifyitems(items):
    """Tests of a part stay together; parts come in the order above, unknown ones in the middle."""
    place = {name: number for number, name in enumerate(ORDER)}
    root = Path(__file__).parent

    def when(item):
        first = item.path.relative_to(root).parts[0].removesuffix(".py") if root in item.path.parents else ""
        return place.get(first, len(ORDER) // 2)

    items.sort(key=when)


@pytest.fixture(autouse=True)
def interrupts_as_before():
    """What a test leaves as the handler of an interrupt does not reach the next one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder with the real image sets, for the tests that want them: UNSKEW_TEST_DATA names it."""
    folder = os.environ.get("UNSKEW_TEST_DATA")
    if not folder:
        pytest.skip("needs real image sets: set UNSKEW_TEST_DATA to a folder that holds them")
    return Path(folder)


@pytest.fixture
def in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory):
    """No test, and nothing that several tests share, sees or changes which plug-ins its user has named."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.getbasetemp() / "state")


@pytest.fixture(autouse=True)
def quiet_surroundings(monkeypatch, tmp_path_factory):
    """No test sees the data folder or the cache of whoever runs it."""
    monkeypatch.delenv("UNSKEW_DATA", raising=False)
    monkeypatch.setenv("UNSKEW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
