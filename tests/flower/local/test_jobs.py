"""What runs on a federation of this machine: an experiment file or an app."""

from pathlib import Path

import pytest

from lamina.experiment import build
from lamina.experiment.config import parse
from lamina.flower.federation import read_nodes
from lamina.flower.local import jobs, processes
from lamina.rounds.settings import TrainSettings

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize("length", [{"local_steps": 4}, {"epochs": 2}])
def test_the_shim_builds_the_federation(tmp_path, length):
    train = {"rounds": 7, "lr": 0.5, **length}
    tables = {"model": {"name": "mlp", "hidden": 8}, "clock": {"name": "4g", "step_seconds": 2}}
    spec = parse({"data": {"clients": 3}, "train": train, **tables})
    number = 2**64 - 1  # as long as Flower's get
    nodes = {number: 2, 5: 0, 6: 1}
    jobs.write_app(tmp_path / "app", spec, {"deadline": 9.0, "quorum": 2, "out": None, "nodes": nodes})
    scope = {"__file__": str(tmp_path / "app" / "lamina_up" / "__init__.py"), "__name__": "lamina_up"}
    exec((tmp_path / "app" / "lamina_up" / "__init__.py").read_text(), scope)
    made = scope["federation"]
    config = made.config()
    assert (config["train"]["rounds"], config["train"]["lr"], config["data"]["clients"]) == (7, 0.5, 3)
    assert made.protocol == TrainSettings.of(made.algorithm, build.settings_of(spec))
    assert made.deadline == 9.0
    assert read_nodes(made.nodes, 3) == nodes
    assert made.out is None


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_run_that_failed_is_one_line(tmp_path, rounds):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"round": {n + 1}}}\n' for n in range(rounds)))
    status = {"status": "finished:failed", "status-details": "ServerApp failed with exception: too few"}
    failed = jobs.Job(tmp_path, 3).failed(status, Path("logs"), "run it again")
    assert isinstance(failed, processes.FederationFailed)
    kept = "2 rounds are kept; run it again; " if rounds else ""
    assert str(failed) == f"the run failed: too few ({kept}logs: logs/)"
