import pytest

from run_folders import write_run


@pytest.fixture
def two(tmp_path):
    """FedAvg with two seeds, Fed-LAMB with two seeds of which one never reaches 90 %."""
    write_run(tmp_path / "fedavg" / "seed0", [0.5, 0.9, 0.7])
    write_run(tmp_path / "fedavg" / "seed1", [0.5, 0.6, 0.9], seed=1)
    write_run(tmp_path / "fedlamb" / "seed0", [0.9, 0.2, 0.2], algorithm="fedlamb", lr=0.03)
    write_run(tmp_path / "fedlamb" / "seed1", [0.8, 0.6, 0.4], algorithm="fedlamb", lr=0.03, seed=1)
    return tmp_path


@pytest.fixture
def timed(tmp_path):
    """The same accuracies on a clock: a round of FedAvg takes 10 s, and one of Fed-LAMB 4 s."""
    write_run(tmp_path / "fedavg" / "seed0", [0.5, 0.9, 0.7], clock=10.0)
    write_run(tmp_path / "fedavg" / "seed1", [0.5, 0.6, 0.9], seed=1, clock=10.0)
    write_run(tmp_path / "fedlamb" / "seed0", [0.9, 0.2, 0.2], algorithm="fedlamb", lr=0.03, clock=4.0)
    write_run(tmp_path / "fedlamb" / "seed1", [0.8, 0.6, 0.4], algorithm="fedlamb", lr=0.03, seed=1, clock=4.0)
    return tmp_path
