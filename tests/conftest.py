"""Lets the tests import the files of the repository root; --slow also runs what takes minutes.

No test asks the hub for a model: offline, a name that is no folder fails at once. Where tests run
side by side (pytest -n), each process has one thread, and large files come first. No test forks."""
import os
import signal
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"                              # before transformers is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"                         # before torch is imported
# a background job is started with another
signal.signal(signal.SIGINT, signal.default_int_handler)
TESTS = Path(__file__).parent
ROOMS = [str(room) for room in TESTS.iterdir() if room.is_dir()]
sys.path[:0] = [str(TESTS.parent), str(TESTS), *ROOMS]


@pytest.fixture(scope="session", autouse=True)
def no_loss_curves():
    """Drawing one takes longer than the small trainings of the tests; test_train.py tests one."""
    from support.common.figures import pyplot
    from beyond.training import run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "save_figure", lambda figure, path: pyplot().close(figure))
        yield


@pytest.fixture
def no_java(monkeypatch):
    """METEOR takes seconds to start; test_meteor tests it once."""
    monkeypatch.setattr("support.common.java.java_problem", lambda: "needs Java")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config, items):
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: -item.path.stat().st_size)
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes: pytest --slow"))
