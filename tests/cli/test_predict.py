"""``lamina predict``: from a run folder and a file of new data to a CSV file."""

import csv
import io

import numpy as np
import pytest
import torch

import lamina
from lamina.cli import main

TABLE = """\
[data]
name = "table"
path = "patients.csv"
label = "outcome"
features = ["age"]
categorical = ["ward"]
missing = "mean"
clients = 3
[model]
name = "mlp"
hidden = 4
[train]
rounds = 1
[run]
device = "cpu"
"""


def run_of(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


@pytest.fixture
def patients(empty_folder):
    """A run of an experiment file on a table, without its table."""
    rows = ["id,age,ward,outcome", *(f"{i:03},{20 + i},{'ns'[i % 2]},{['well', 'ill'][i % 3 > 1]}" for i in range(40))]
    (empty_folder / "patients.csv").write_text("\n".join([*rows, "040,,n,well"]) + "\n")
    (empty_folder / "patients.toml").write_text(TABLE)
    assert run_of("run", "patients.toml", "--out", "runs/p", "--quiet") == 0
    (empty_folder / "patients.csv").rename("moved.csv")
    (empty_folder / "new.csv").write_text("ward,id,age\ns,007,33\nn,008,\n")
    return empty_folder


def test_a_new_table_gets_a_row_for_every_row(patients, capsys):
    capsys.readouterr()
    assert run_of("predict", "runs/p", "new.csv") == 0
    printed = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert list(rows[0]) == ["ward", "id", "age", "prediction", "probability_ill", "probability_well"]
    assert [row["id"] for row in rows] == ["007", "008"]  # as they are written
    predictions = lamina.load("runs/p").predict("new.csv")
    assert [row["prediction"] for row in rows] == predictions.classes.tolist()
    assert [float(row["probability_ill"]) for row in rows] == predictions.probabilities[:, 0].tolist()
    assert run_of("predict", "runs/p", "new.csv", "--out", "predictions.csv") == 0
    assert (patients / "predictions.csv").read_text() == printed
    assert run_of("predict", "runs/p", "new.csv", "--out", "predictions.csv") == 0  # replaces its own


def test_a_parquet_file_has_the_same_table(patients, capsys):
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    for _ in range(2):  # the second replaces the first
        assert run_of("predict", "runs/p", "new.csv", "--out", "p.parquet") == 0
    assert "2 predictions in p.parquet" in capsys.readouterr().out
    table = pandas.read_parquet("p.parquet")
    predictions = lamina.load("runs/p").predict("new.csv")
    assert list(table) == ["ward", "id", "age", "prediction", "probability_ill", "probability_well"]
    assert table["id"].tolist() == ["007", "008"]
    assert table["prediction"].tolist() == predictions.classes.tolist()
    assert table["probability_ill"].tolist() == predictions.probabilities[:, 0].tolist()
    pandas.DataFrame({"age": [1]}).to_parquet("mine.parquet")
    assert run_of("predict", "runs/p", "new.csv", "--out", "mine.parquet") == 2
    assert "'mine.parquet' is there and is no table of predictions" in capsys.readouterr().err


def test_the_labelled_table_is_evaluated_as_it_is(patients):
    run = lamina.load("runs/p")
    measured = run.evaluate("moved.csv")
    predicted = run.predict("moved.csv").classes
    actual = [row["outcome"] for row in csv.DictReader((patients / "moved.csv").open())]
    assert measured["accuracy"] == pytest.approx(np.mean(predicted == np.array(actual)))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere", "new.csv"], "not a run's folder"),
        (["runs/p", "nothing.csv"], "there is no file or folder 'nothing.csv'"),
        (["runs/p", "taken.csv"], "has a column 'prediction'"),
        (["runs/p", "short.csv"], "no column 'age'"),
        (["runs/p", "new.csv", "--out", "p.xlsx"], "written as .csv or .parquet, not as '.xlsx'"),
        (["runs/p", "new.csv", "--out", "new.csv"], "is no table of predictions"),
        (["runs/p", "new.csv", "--out", "runs/p/predictions.csv"], "inside the run folder"),
    ],
)
def test_bad_input_is_one_line(patients, capsys, words, problem):
    (patients / "taken.csv").write_text("ward,prediction,age\ns,007,33\n")
    (patients / "short.csv").write_text("ward\ns\n")
    capsys.readouterr()
    assert run_of("predict", *words) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_arrays_and_pictures(empty_folder, capsys):
    image = pytest.importorskip("PIL.Image")
    pixels = torch.randint(0, 256, (20, 1, 6, 6), dtype=torch.uint8)
    simulation = lamina.Simulation(
        "mlp", (pixels, ["cat", "dog"] * 10), "fedavg", clients=2, out="runs/pets", device="cpu"
    )
    simulation.run(1)
    np.savez("new.npz", x=pixels[:3].numpy())
    (empty_folder / "album" / "more").mkdir(parents=True)
    for name, each in zip(("b.png", "a.png", "more/c.png"), pixels, strict=False):
        image.fromarray(each[0].numpy()).save(empty_folder / "album" / name)
    expected = simulation.model(pixels[:3] / 255).argmax(1)
    names = np.array(["cat", "dog"])[expected].tolist()
    capsys.readouterr()
    run_of("predict", "runs/pets", "new.npz")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["row"], row["prediction"]) for row in rows] == list(zip("012", names, strict=True))
    run_of("predict", "runs/pets", "album")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    found = {row["file"]: row["prediction"] for row in rows}
    assert found == dict(zip(("b.png", "a.png", "more/c.png"), names, strict=True))
    assert lamina.load("runs/pets").predict("album/a.png").classes.tolist() == names[1:2]


def test_a_clients_own_model_predicts(empty_folder, capsys):
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    data = {"north": (x[:6], y[:6]), "south": (x[6:], 1 - y[6:])}
    settings = {"private": ["weight"], "lr": 1.0, "device": "cpu", "out": "runs/x"}
    simulation = lamina.Simulation(torch.nn.Linear(3, 2), data, "fedavg", **settings)
    simulation.run(9)
    np.savez("new.npz", x=x.numpy())
    capsys.readouterr()
    assert run_of("predict", "runs/x", "new.npz", "--client", "south") == 0
    printed, warned = capsys.readouterr()
    predicted = [int(row["prediction"]) for row in csv.DictReader(io.StringIO(printed))]
    assert predicted == simulation.client_model("south")(x).argmax(1).tolist()
    assert predicted != simulation.client_model("north")(x).argmax(1).tolist()
    assert "private parts" not in warned
    assert run_of("predict", "runs/x", "new.npz", "--client", "soth") == 2
    assert "there is no client 'soth'; did you mean 'south'?" in capsys.readouterr().err
