"""Real processes: a SuperLink and three SuperNodes on loopback, with TLS and node authentication.

Run by `make test-federation`; left out where pytest is not pointed at this folder, because Flower's waits are long.
"""

import signal
from pathlib import Path

import pytest

from federation.harness import NODES, Say, left

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path, config):
    asked = any(Path(str(argument).partition("::")[0]).resolve().is_relative_to(HERE) for argument in config.args)
    return None if asked else True


@pytest.fixture(autouse=True)
def hard_timeout(request):
    """Every test ends: a federation that hangs is interrupted, and its processes are ended by their fixture."""
    seconds = (request.node.get_closest_marker("seconds") or pytest.mark.seconds(300).mark).args[0]

    def late(number, frame):
        pytest.fail(f"took more than {seconds} s")  # which no `except Exception` on the way swallows

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pytest_configure(config):
    config.addinivalue_line("markers", "seconds(n): the most a test may take")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """One federation for all tests of a file: starting it costs more than most of them."""
    from lamina.flower.local.federation import LocalFederation

    made = LocalFederation(tmp_path_factory.mktemp("federation"), NODES, say=Say())
    with made:
        yield made
    assert left(made) == []
