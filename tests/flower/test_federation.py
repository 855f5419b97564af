"""`Federation`: the object an experiment file makes, its configuration, its list of nodes, and its run folder."""

import json

import pytest
import torch
from safetensors.torch import load_file

import lamina
from flower_grid import LoopGrid
from flower_setup import (
    NODE,
    Setup,
    assert_same_run,
    nodes,
    part_of,
    small_model,
)
from lamina.api.describe import describe
from lamina.base.errors import BadInput
from lamina.experiment import build as building
from lamina.experiment.config import parse
from lamina.experiment.runs.records import read_record
from lamina.flower import Federation, Stopped
from lamina.flower.federation import read_nodes
from lamina.report import build as report


@pytest.mark.parametrize("clock", [None, {"name": "4g", "step_seconds": [0.1, 0.2, 0.1, 0.1, 0.15], "deadline": 1.5}])
def test_an_experiment_file_is_a_federation(tmp_path, clock):
    experiment = parse({
        "data": {"name": "digits", "clients": 5, "partition": {"name": "dirichlet", "alpha": 0.5, "refill": True}},
        "model": {"name": "mlp"}, "algorithm": {"name": "fedlamb", "sync_every": 2}, "clock": clock,
        "train": {"rounds": 3, "participation": 0.6, "seed": 3}, "run": {"device": "cpu", "engine": "loop"},
    })  # fmt: skip
    simulation = building.build(experiment)
    simulation.run(3)
    federation = Federation.from_experiment(experiment, out=tmp_path / "run", state_dir=tmp_path / "state", poll=0.005)
    grid = LoopGrid(federation.client_app(), nodes(5))
    federation.server_app()(grid, grid.contexts[NODE])
    rows = list(read_record(tmp_path / "run").history)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert_same_run(rows, weights, simulation.history, simulation.model.state_dict())
    config = read_record(tmp_path / "run").config
    assert config["data"]["partition"]["alpha"] == 0.5
    assert (config["run"]["engine"], config["federation"]) == ("flower", {"on": "flower"})
    run, test = lamina.load(tmp_path / "run"), building.load_data(experiment).test
    torch.testing.assert_close(run.predict(test.x).outputs, simulation.model(test.x))
    assert run.evaluate(test)["accuracy"] == pytest.approx(simulation.history[-1]["accuracy"])


def test_a_partition_that_moves_is_refused():
    experiment = parse({"data": {"partition": {"name": "reallocate"}}})
    with pytest.raises(BadInput, match="'reallocate' gives clients other data in every round"):
        Federation.from_experiment(experiment)


def test_a_list_of_nodes_may_be_a_file(tmp_path):
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({str(2**63 + 5): 1, "7": 0}))
    assert read_nodes(str(path), 2) == {2**63 + 5: 1, 7: 0}
    for text, why in (
        ('{"7": 2}', "needs a client of its own, 0 to 1"),
        ('{"7": 0, "8": 0}', "needs a client of its own, 0 to 1"),
        ("[1]", "is no table such as"),
        ("{", "is no table such as"),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=why):
            read_nodes(path, 2)
    with pytest.raises(BadInput, match=r"none.json is no table such as .* No such file"):
        read_nodes(tmp_path / "none.json", 2)
    with pytest.raises(BadInput, match="the server has no list of nodes: give its path as nodes in the run config"):
        read_nodes("", 2)


def test_the_run_folder_is_that_of_a_simulation(tmp_path):
    setup = Setup(tmp_path, "fedlamb", rounds=2)
    setup.run()
    assert {path.name for path in setup.out.iterdir()} >= {
        "config.json", "environment.json", "metrics.jsonl", "log.txt", "checkpoints", "model.safetensors",
        "best.safetensors", "federation.jsonl",
    }  # fmt: skip
    made = report.build([setup.out])
    assert [curve.records[0].algorithm for curve in made.curves] == ["fedlamb"]
    assert made.tables()
    from lamina.cli.export import table_parts

    assert "wire_bytes_down" in next(table_parts([setup.out])).decode()


@pytest.mark.parametrize("augmentation", [None, lamina.data.Augment(2, fill="mean")])
def test_the_run_folder_tells_the_augmentation_as_a_simulations_does(augmentation):
    federation = Federation("fedavg", small_model, part_of, clients=4, rounds=1, augmentation=augmentation)
    file = describe("mlp", "digits", "fedavg", settings={"augmentation": augmentation}).model_dump(exclude_unset=True)
    keys = {key: value for key, value in federation.config()["data"].items() if key.startswith("augment")}
    assert keys == {key: value for key, value in file["data"].items() if key.startswith("augment")}
    assert bool(keys) == (augmentation is not None)


def test_the_reason_for_a_stop_is_in_the_log(tmp_path):
    setup = Setup(tmp_path, "fedavg", more={"deadline": 0.05, "attempts": 1})
    grid = setup.grid()
    grid.offline.update(grid.contexts)
    with pytest.raises(Stopped) as stopped:
        setup.run(grid)
    assert f"ERROR the run stopped: {stopped.value}\n" in (setup.out / "log.txt").read_text()
