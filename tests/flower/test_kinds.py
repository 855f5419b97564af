"""A federation in one process agrees with its simulation for every kind of input, target and loss."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

import kinds
import lamina
from flower_grid import LoopGrid
from flower_setup import nodes
from lamina.data import as_dataset
from lamina.experiment.build import build
from lamina.experiment.config import parse
from lamina.experiment.runs.records import read_record
from lamina.flower import Federation

ROUNDS = 2


def federation(kind, folder, part, **settings):
    """The federation of `kinds.simulation`."""
    _, _, loss = kinds.KINDS[kind]
    return Federation(
        kinds.algorithm_for(kind), lambda: kinds.model(kind), part, clients=3, rounds=ROUNDS,
        test=lambda: whole(kind), out=folder / "run", state_dir=folder / "state", device="cpu", poll=0.005,
        deadline=5.0, loss=loss, batch_size=4, participation=0.7, lr=0.05, seed=3, **settings,
    )  # fmt: skip


def whole(kind):
    """Return the samples of all nodes; their labels are numbers, with the classes' names."""
    return dataclasses.replace(as_dataset(kinds.KINDS[kind][1]()))


def part_of(kind):
    """Return the function from a node to its samples."""
    data = whole(kind)
    return lambda context: data.subset(kinds.PARTS[context.node_config["partition-id"]])


def run(made):
    grid = LoopGrid(made.client_app(), nodes(3))
    made.server_app()(grid, next(iter(grid.contexts.values())))


MARKED = [pytest.param(kind, marks=pytest.mark.long if kind in kinds.TRANSFORMERS else ()) for kind in kinds.KINDS]


@pytest.mark.parametrize("kind", MARKED)
def test_a_federation_is_its_simulation(kind, tmp_path):
    run(federation(kind, tmp_path, part_of(kind)))
    expected = kinds.simulation(kind, "loop")
    expected.run(ROUNDS)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("kind", "metrics"),
    [
        ("padded_lm", ["perplexity", "accuracy", "top5_accuracy"]),
        ("segmentation", ["accuracy"]),
        ("mae", ["rmse", "mae"]),
    ],
)
def test_metrics_averaged_over_nodes_are_those_of_all_samples(kind, metrics, tmp_path):
    run(federation(kind, tmp_path, part_of(kind), metrics=metrics, evaluate_on="nodes"))
    simulated = kinds.simulation(kind, "loop", metrics=metrics).run(ROUNDS)  # its test data are those of all clients
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row, expected in zip(rows, simulated, strict=True):
        for name in ("loss", *metrics):
            assert row[f"node_{name}"] == pytest.approx(expected[name], rel=1e-6)


def test_metrics_that_cannot_be_averaged_over_nodes(tmp_path):
    with pytest.raises(lamina.BadInput, match="metric 'f1' cannot be averaged over nodes: leave it out, or"):
        federation("tuple", tmp_path, part_of("tuple"), metrics=["accuracy", "f1"], evaluate_on="nodes")
    run(federation("tuple", tmp_path, part_of("tuple"), metrics=["f1", "accuracy"], evaluate_on="both"))
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"f1", "accuracy", "node_accuracy"} <= set(row)
    assert "node_f1" not in row


@pytest.mark.parametrize("made", [tuple, lambda pair: lamina.Dataset(*pair)], ids=["pair", "data set"])
def test_text_labels_without_names_are_refused(made, tmp_path):
    """Each node would number the classes that it holds by itself."""
    pair = ({"input_ids": [[1, 2], [3]]}, ["ham", "spam"])
    with pytest.raises(lamina.LaminaError, match=r"class_names=\[…\]"):
        run(federation("dict", tmp_path, lambda context: made(pair)))


def test_a_private_head_of_several(tmp_path):
    """The model returns a dict, the targets are a dict, and one of its two heads stays with the client."""
    private = {"private": ["size.*"]}
    run(federation("dict_targets", tmp_path, part_of("dict_targets"), **private, evaluate_on="both"))
    expected = kinds.simulation("dict_targets", "loop", **private)
    rows = expected.run(ROUNDS)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11)
    row = read_record(tmp_path / "run").history[-1]
    assert (row["loss"], row["train_loss"]) == pytest.approx((rows[-1]["loss"], rows[-1]["train_loss"]), rel=1e-6)
    x, y = kinds.KINDS["dict_targets"][1]()
    total = 0.0
    for client, part in enumerate(kinds.PARTS):
        outputs = expected.client_model(client)(x[part])
        total += float(kinds.of_heads(**outputs, **{name: values[part] for name, values in y.items()}).detach().sum())
    assert row["node_loss"] == pytest.approx(total / kinds.SAMPLES, rel=1e-6)


@pytest.mark.parametrize("private", [["output.*"], None], ids=str)
def test_the_server_reports_what_the_simulation_does(private, tmp_path):
    """With private parts, the server has the shared model only, and its columns say so."""
    spec = parse(
        {
            "data": {"name": "digits", "clients": 3, "local_test": 0.2},
            "model": {"name": "mlp", "hidden": 4},
            "algorithm": {"name": "fedavg"},
            "train": {"rounds": 2, "participation": 1.0} | ({"private": private} if private else {}),
            "run": {"device": "cpu", "engine": "loop"},
        }
    )
    run(Federation.from_experiment(spec, out=tmp_path / "run", state_dir=tmp_path / "state", poll=0.005))
    row, expected = [read_record(tmp_path / "run").history[-1], build(spec).run(2)[-1]]
    columns = {name for name in row if "client_" in name}
    assert columns == {name for name in expected if name.startswith("shared_client_" if private else "client_")}
    for column in (*columns, "accuracy", "loss"):
        assert row[column] == pytest.approx(expected[column], abs=1e-5)
    assert read_record(tmp_path / "run").history.metric == "accuracy"


def test_names_in_an_experiment_are_common_to_all_nodes(tmp_path, monkeypatch):
    """The data of a user's function are whole on every node: their text labels have common numbers."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mails.py").write_text(
        "import lamina, torch\n"
        "def load():\n"
        "    names = ['ham', 'spam', 'spam'] * 8\n"
        "    data = [lamina.Dataset(torch.randn(24, 3), names) for _ in range(2)]\n"
        "    return tuple(data)\n"
    )
    spec = parse(
        {
            "data": {"name": "mails:load", "clients": 3, "partition": {"name": "classes", "k": 1}},
            "model": {"name": "mlp", "hidden": 4},
            "algorithm": {"name": "fedavg"},
            "train": {"rounds": 1, "participation": 1.0},
            "run": {"device": "cpu", "engine": "loop"},
        }
    )
    run(Federation.from_experiment(spec, out=tmp_path / "run", state_dir=tmp_path / "state", poll=0.005))
    assert "accuracy" in (tmp_path / "run" / "metrics.jsonl").read_text()
