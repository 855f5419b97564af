"""The adapter under Flower's own simulation engine (Ray): about half a minute, most of it Ray's start and stop.

Leave it out with ``--ignore tests/test_flower_simulation.py``.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray")

CODE = """
import sys
from flwr.simulation import run_simulation
from flower_setup import Setup, assert_like_the_simulation

setup = Setup(sys.argv[1], "scaffold", rounds=3, more={"deadline": 60.0})
run_simulation(
    setup.federation().server_app(), setup.client_app(), num_supernodes=4,
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
)
assert_like_the_simulation(setup)
print("the same numbers")
"""


@pytest.fixture
def short_folder():
    """The names of Ray's sockets may not be long."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        yield folder


@pytest.mark.long
def test_flowers_simulation_engine_gives_the_same_numbers(tmp_path, short_folder):
    home = tmp_path / "home"
    home.mkdir()
    (home / "ray_bootstrap_config.yaml").write_text("provider: {type: local}\n")  # else Ray looks for a cloud
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]),
        "HOME": str(home),
        "RAY_TMPDIR": short_folder,
        "FLWR_HOME": str(tmp_path / "flwr"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(tmp_path / "federation")], env=environment, cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        said, complaints = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, complaints
    assert "the same numbers" in said
