"""Several named test sets: columns by name, the first one is judged."""

import tomllib

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.data.cropping import with_cropped_test
from lamina.data.dataset import Dataset, Splits
from lamina.experiment.build import build, resolved
from lamina.experiment.config import load, parse
from lamina.experiment.runs.records import find_records
from lamina.experiment.trials import reproduction
from lamina.training.metrics import is_metric, is_percent, of_column, smaller_is_better

X = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
DATA = (X, (X[:, 0] > 0).long())
CLEAN, NOISY = (X[:20], DATA[1][:20]), (X[20:50].flip(1), DATA[1][20:50])


def simulation(test, **more):
    options = {"clients": 4, "lr": 0.3, "device": "cpu", **more}
    torch.manual_seed(0)
    return lamina.Simulation(nn.Linear(4, 2), DATA, "fedavg", test=test, **options)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_every_set_is_evaluated_and_the_first_is_the_one_judged(engine):
    both = simulation({"clean": CLEAN, "noisy": NOISY}, engine=engine, metrics=["f1", "accuracy"]).run(3)
    for test, ending in ((CLEAN, ""), (NOISY, "@noisy")):
        alone = simulation(test, engine=engine, metrics=["f1", "accuracy"]).run(3)
        for name in ("loss", "f1", "accuracy"):
            assert both.column(f"{name}{ending}") == alone.column(name)
    assert both.metric == "f1"
    assert both.best() == max(both.column("f1"))
    assert both.best("loss@noisy") == min(both.column("loss@noisy"))
    assert "accuracy@noisy" in repr(both)


def test_the_columns_have_the_direction_of_their_metric():
    assert of_column("f1@noisy") is of_column("f1")
    assert is_metric("f1@noisy")
    assert is_percent("accuracy@noisy")
    assert smaller_is_better("loss@north")
    assert not smaller_is_better("accuracy@loss")
    assert not is_metric("drift@noisy")


def test_the_folder_knows_all_sets(tmp_path):
    first = simulation({"clean": CLEAN, "noisy": NOISY}, out=tmp_path / "run")
    first.run(2)
    again = simulation({"clean": CLEAN, "noisy": NOISY}, out=tmp_path / "run")
    assert again.run(2).column("accuracy@noisy") == first.history.column("accuracy@noisy")
    assert find_records([tmp_path])[0].history.metric == "accuracy"
    other = simulation({"clean": CLEAN, "noisy": CLEAN}, out=tmp_path / "run")
    with pytest.raises(lamina.BadInput, match="another run"):
        other.run(2)


def test_a_comparison_reports_every_set(tmp_path):
    result = lamina.compare(lambda: nn.Linear(4, 2), DATA, ["fedavg"], test={"clean": CLEAN, "noisy": NOISY}, rounds=2,
                            clients=4, seeds=1, lr=[0.1, 0.3], device="cpu", out=tmp_path / "c")  # fmt: skip
    (final,) = result.histories["fedavg"]
    assert {"accuracy", "accuracy@noisy"} <= set(final.columns)
    tuning = [record for record in find_records([tmp_path / "c"]) if record.on_validation_data]
    assert tuning
    assert not any("accuracy@noisy" in record.history.columns for record in tuning)


def test_labels_are_numbered_as_in_the_training_data():
    names = ["b" if label else "a" for label in DATA[1]]
    named = {"clean": (X[:20], names[:20]), "rest": (X[20:], names[20:])}
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    history = lamina.Simulation(model, (X, names), "fedavg", test=named, clients=4, lr=0.3, device="cpu").run(2)
    assert history.best("accuracy@rest") > 0.5


@pytest.mark.parametrize("test", [{}, {"a b": CLEAN}, {1: CLEAN}])
def test_names_are_words(test):
    with pytest.raises(lamina.BadInput, match="name every test set by a word"):
        simulation(test)


def test_a_bad_set_is_refused_before_training():
    with pytest.raises(lamina.BadInput):
        simulation({"clean": CLEAN, "odd": (torch.randn(5, 3), torch.zeros(5).long())})
    with pytest.raises(lamina.BadInput, match="appears only in the test data"):
        simulation({"clean": CLEAN, "odd": (X[:5], torch.tensor([0, 1, 2, 0, 1]))})


def test_of_data_by_client_a_dict_is_the_test_data_of_each():
    parts = {"north": (X[:40], DATA[1][:40]), "south": (X[40:], DATA[1][40:])}
    run = lamina.Simulation(nn.Linear(4, 2), parts, "fedavg", test=parts, lr=0.3, device="cpu")
    assert not any("@" in column for column in run.run(1).columns)


PARTS = {"north": (X[:40], DATA[1][:40]), "south": (X[40:], DATA[1][40:])}
FLIPPED = {name: (x.flip(1), y) for name, (x, y) in PARTS.items()}


def by_client(test, **more):
    torch.manual_seed(0)
    return lamina.Simulation(nn.Linear(4, 2), PARTS, "fedavg", test=test, lr=0.3, device="cpu", **more)


def test_named_sets_may_be_by_client(tmp_path):
    run = by_client({"clean": PARTS, "flipped": FLIPPED}, out=tmp_path / "run")
    row = run.run(1)[0]
    alone = by_client(PARTS).run(1)[0]
    assert {name: row[name] for name in alone if "accuracy" in name} == {
        n: v for n, v in alone.items() if "accuracy" in n
    }
    assert row["accuracy@flipped"] == by_client(FLIPPED).run(1)[0]["accuracy"] != row["accuracy"]
    again = by_client({"clean": PARTS, "flipped": FLIPPED}, out=tmp_path / "run")
    assert again.run(1)[0]["accuracy@flipped"] == row["accuracy@flipped"]


def test_named_sets_of_data_by_client_may_be_of_all_clients():
    row = by_client({"clean": CLEAN, "noisy": NOISY}).run(1)[0]
    assert row["accuracy"] == by_client(CLEAN).run(1)[0]["accuracy"]
    assert row["accuracy@noisy"] == by_client(NOISY).run(1)[0]["accuracy"]


@pytest.mark.parametrize("test", [{"north": CLEAN, "east": NOISY}, {"North": CLEAN, "SOUTH": NOISY}])
def test_a_dict_with_a_client_is_by_client(test):
    with pytest.raises(lamina.BadInput, match="has test data but no training data"):
        by_client(test)


def test_an_infinite_or_missing_number_on_a_further_set_is_seen(caplog):
    sums = X.sum(1, keepdim=True)
    tests = {"near": (X[:20], sums[:20]), "far": (X[:20], 1e30 * sums[:20])}
    run = lamina.Simulation(nn.Linear(4, 1), (X, sums), "fedavg", test=tests, loss="mse", clients=4, device="cpu")
    with pytest.raises(lamina.Diverged, match=r"the test loss of the new model \(loss@far\) is inf"):
        run.run(1)
    odd = lamina.Metric("odd", lambda outputs, targets: float("nan") if len(targets) == len(NOISY[1]) else 0.5)
    simulation({"clean": CLEAN, "noisy": NOISY}, metrics=[odd]).run(2)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "round 1: the metric 'odd@noisy' is NaN"
    ]


FILE = """
[data]
name = "arrays"
path = "train.npz"
test = { clean = "clean.npz", noisy = "noisy.npz" }
clients = 4
[model]
name = "mlp"
[train]
rounds = 2
[run]
device = "cpu"
"""


def write_arrays(folder):
    for name, (x, y) in {"train": DATA, "clean": CLEAN, "noisy": NOISY}.items():
        np.savez(folder / f"{name}.npz", x=x.numpy(), y=y.numpy())


def own_data():
    """Found as test_named_tests:own_data."""
    return DATA, {"clean": CLEAN, "noisy": NOISY}


@pytest.mark.parametrize("source", ["file", "function"])
def test_an_experiment_file_names_several_test_sets(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    write_arrays(tmp_path)
    data = {} if source == "file" else {"name": f"{__name__}:own_data", "clients": 4}
    tree = tomllib.loads(FILE)
    experiment = parse(tree | ({"data": data} if data else {}))
    history = build(experiment).run(2)
    for test, ending in ((CLEAN, ""), (NOISY, "@noisy")):
        alone = lamina.Simulation("mlp", DATA, "fedlamb", test=test, clients=4, participation=0.5, device="cpu").run(2)
        for name in ("loss", "accuracy"):
            assert history.column(f"{name}{ending}") == pytest.approx(alone.column(name))


def test_a_file_with_another_named_test_set_is_another_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_arrays(tmp_path)
    configs = []
    for _ in range(2):
        experiment = parse(tomllib.loads(FILE))
        configs.append(resolved(experiment, build(experiment))["data_digest"])
        np.savez("noisy.npz", x=CLEAN[0].numpy(), y=CLEAN[1].numpy())
    assert configs[0] != configs[1]


@pytest.mark.parametrize("test", [{}, {"a b": "a.npz"}, {"clean": 0.2, "noisy": "noisy.npz"}])
def test_named_test_sets_of_a_file_are_files(test):
    with pytest.raises(lamina.BadInput, match="a table gives every test set a name that is a word, and a file"):
        parse({"data": {"name": "arrays", "path": "train.npz", "test": test}})


def test_validation_data_take_the_place_of_all_test_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_arrays(tmp_path)
    tree = tomllib.loads(FILE)
    tree["data"]["validation"] = 0.25
    assert "accuracy@noisy" not in build(parse(tree)).run(1).columns


def test_cropped_images_are_windows_of_padded_ones():
    x = torch.randint(1, 256, (1200, 2, 5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    test = Dataset(x, torch.arange(1200) % 3, mean=(0.5, 0.5), std=(0.2, 0.2))
    whole = with_cropped_test(Splits(test, test), pad=2).test
    cropped = whole.more_tests["cropped"]
    assert torch.equal(whole.x, x)
    assert torch.equal(cropped.y, test.y)
    assert (cropped.mean, cropped.classes) == (test.mean, 3)
    windows = nn.functional.pad(x, (2, 2, 2, 2)).unfold(2, 5, 1).unfold(3, 6, 1)  # [n, channels, 5, 5, 5, 6]
    is_same = (windows == cropped.x[:, :, None, None]).all(dim=(1, 4, 5))
    assert is_same.flatten(1).any(1).all()
    counts = is_same.sum(0)
    assert counts.min() > 20  # of 48 on average
    assert torch.equal(with_cropped_test(Splits(test, test), pad=2).test.more_tests["cropped"].x, cropped.x)


def test_a_file_asks_for_cropped_test_images(tmp_path):
    given = {"data": {"clients": 5, "test_crop_pad": 1}, "train": {"rounds": 2}, "run": {"device": "cpu"}}
    run = build(parse(given))
    run.run(2)
    cropped, plain = (run.history.column(name)[-1] for name in ("accuracy@cropped", "accuracy"))
    assert cropped != plain
    tuning = parse(given | {"data": given["data"] | {"validation": 0.2}})
    assert build(tuning).test_data.more_tests == {}


@pytest.mark.parametrize(
    ("test", "text"),
    [
        (None, "needs test images .*, and there are none: leave it out"),
        (Dataset(*CLEAN), "needs test images .*, and found Dataset.* 20 samples of .*: leave it out"),
    ],
    ids=["none", "table"],
)
def test_data_without_images_cannot_be_cropped(test, text):
    with pytest.raises(lamina.BadInput, match=text) as caught:
        with_cropped_test(Splits(Dataset(*DATA), test), pad=2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["adaptive-2026-cifar100", "adaptive-2026-cifar100-skewed"])
def test_the_claim_of_fedmuons_authors_is_tested_with_and_without_cropping(name):
    experiment = load(reproduction.papers()[name])
    claims = [claim for claim in experiment.claim if "FedMuon's authors" in claim.text]
    assert [claim.metric for claim in claims] == ["accuracy@cropped", "accuracy"]
    assert claims[0].expect == claims[1].expect
    assert sorted(claims[0].paper, key=claims[0].paper.get, reverse=True) == claims[0].expect
    assert (experiment.data.name, experiment.data.test_crop_pad) == ("cifar100", 4)
