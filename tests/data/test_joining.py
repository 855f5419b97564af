"""A list or a dict with the data set of each client: it trains as one data set whose column names the clients."""

import logging

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lamina
from lamina.base.errors import BadInput
from lamina.data import ByColumn
from lamina.data.joining import as_data
from lamina.data.mapped import Mapped

NOISE = torch.Generator().manual_seed(0)
X, Y = torch.randn(30, 4, generator=NOISE), torch.arange(30) % 3
PARTS = [slice(0, 7), slice(7, 19), slice(19, 30)]
PAIRS = [(X[part], Y[part]) for part in PARTS]
SETTINGS = {"lr": 0.1, "batch_size": 4, "seed": 3}


def rows(history):
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in history]


def torch_set(pair):
    return torch.utils.data.TensorDataset(*pair)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("make", [tuple, lambda pair: lamina.Dataset(*pair), torch_set, list])
def test_a_list_of_data_sets_trains_as_lists_of_samples_do(make, engine):
    model = nn.Linear(4, 3)
    expected = lamina.Simulation(model, (X, Y), "fedlamb", clients=[range(7), range(7, 19), range(19, 30)], test=(X, Y),
                                 engine=engine, **SETTINGS).run(2)  # fmt: skip
    run = lamina.Simulation(model, [make(pair) for pair in PAIRS], "fedlamb", test=(X, Y), engine=engine, **SETTINGS)
    assert run.plan.clients.count == 3
    assert rows(run.run(2)) == rows(expected)


def test_the_keys_of_a_dict_name_the_clients(tmp_path):
    named = dict(zip(["south", "north", "east"], PAIRS, strict=True))
    run = lamina.Simulation(nn.Linear(4, 3), named, "fedavg", heldout_clients=["north"], **SETTINGS)
    held = run.reserved.heldout
    assert torch.equal(run.train_data.x[held[0]], PAIRS[1][0])
    assert [len(part) for part in run.plan.clients.parts] == [11, 7]  # east, south: in the order of their names
    kept = lamina.Simulation(nn.Linear(4, 3), named, "fedavg", test=PAIRS[0], out=tmp_path / "r", **SETTINGS)
    kept.run(1)
    assert kept.history[0]["clients"] == 3
    again = lamina.Simulation(kept.model, list(PAIRS), "fedavg", test=PAIRS[0], out=tmp_path / "r", **SETTINGS)
    with pytest.raises(BadInput, match="holds another run"):
        again.run(2)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_test_sets_by_client_give_the_mean_over_clients_and_the_pooled_figure(engine):
    tests = [(X[:4], Y[:4]), (X[4:10], Y[4:10]), (X[10:], Y[10:])]
    run = lamina.Simulation(nn.Linear(4, 3), PAIRS, "fedavg", test=tests, engine=engine, **SETTINGS)
    row = run.run(1)[0]
    with torch.no_grad():
        right = (run.model(X).argmax(1) == Y).double()
    scores = np.array([float(right[part].mean()) for part in (slice(4), slice(4, 10), slice(10, 30))])
    assert row["accuracy"] == pytest.approx(float(right.mean()))
    assert row["client_accuracy_mean"] == pytest.approx(scores.mean())
    assert row["client_accuracy_worst10"] == pytest.approx(scores.min())
    assert row["client_accuracy_std"] == pytest.approx(scores.std())


def test_some_clients_may_lack_test_data_and_heldout_clients_do_not_count():
    named = dict(zip("abc", PAIRS, strict=True))
    run = lamina.Simulation(
        nn.Linear(4, 3), named, "fedavg", test={"c": PAIRS[0], "a": PAIRS[1]}, heldout_clients=["a"], **SETTINGS
    )
    (group,) = [group for group in run.evaluation.clients if group.prefix == "client_"]
    assert list(group.clients) == [1]  # of b and c, which train
    assert torch.equal(group.data.x[group.parts[0]], PAIRS[0][0])
    assert len(run.test_data) == 19


def test_text_labels_of_all_clients_have_common_numbers():
    data = as_data([(X[:3], ["cat", "dog", "cat"]), (X[:2], ["dog", "ape"])])
    assert (data.class_names, data.y.tolist()) == (("ape", "cat", "dog"), [1, 2, 1, 2, 0])
    run = lamina.Simulation(nn.Linear(4, 3), [(X[:3], ["a", "b", "a"]), (X[:2], ["c", "b"])], "fedavg",
                            test=[(X[:1], ["b"]), (X[:2], ["c", "a"])])  # fmt: skip
    assert run.test_data.y.tolist() == [1, 2, 0]


def test_padded_sequences_of_clients_get_one_length():
    data = as_data([([[1, 2], [3]], [0, 1]), ([[4], [5]], [1, 0]), ([[6, 7, 8]], [1])])
    assert data.x.tolist() == [[1, 2, 0], [3, 0, 0], [4, 0, 0], [5, 0, 0], [6, 7, 8]]
    assert data.mask.sum(1).tolist() == [2, 1, 1, 1, 3]


def test_mapped_data_of_clients_stay_on_disk(tmp_path):
    for i, (x, _) in enumerate(PAIRS):
        np.save(tmp_path / f"{i}.npy", x.numpy())
    mapped = [(np.load(tmp_path / f"{i}.npy", mmap_mode="r"), y) for i, (_, y) in enumerate(PAIRS)]
    model = nn.Linear(4, 3)
    runs = [lamina.Simulation(model, data, "fedavg", **SETTINGS) for data in (PAIRS, mapped)]
    assert isinstance(runs[1].train_data.x, Mapped)
    assert rows(runs[0].run(2)) == rows(runs[1].run(2))


@pytest.mark.long
def test_a_comparison_takes_the_data_of_clients():
    result = lamina.compare(
        lambda: nn.Linear(4, 3), PAIRS, ["fedavg"], test=PAIRS, rounds=1, seeds=1, lr=0.1, progress=False
    )
    assert "client_accuracy_mean" in result.histories["fedavg"][0][0]


def test_a_partition_deals_the_samples_again():
    run = lamina.Simulation(nn.Linear(4, 3), PAIRS, "fedavg", clients=5, partition="iid", test=PAIRS)
    assert run.plan.clients.count == 5
    data = lamina.Dataset(X, Y, columns={"site": np.arange(30) // 10}, client_column="site")
    assert lamina.Simulation(nn.Linear(4, 3), data, "fedavg").plan.clients.count == 3
    assert lamina.Simulation(nn.Linear(4, 3), data, "fedavg", partition=ByColumn("site")).plan.clients.count == 3


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        ([*PAIRS, X], {}, "item 3 of the data is a Tensor and item 0 a data set: give a list with one"),
        ([lamina.Dataset(*PAIRS[0]), PAIRS[1], X], {}, "item 2 of the data is a Tensor and item 0 a data set"),
        ([X, Y, X], {}, r"3 items, of which none is a data set: give a pair \(x, y\), or a list with one"),
        ([], {}, "0 items, of which none is a data set"),
        ([lamina.Dataset(*PAIRS[0]), Y], {}, "item 1 of the data is a Tensor and item 0 a data set"),
        (tuple(map(torch_set, PAIRS[:2])), {}, "a pair of data sets: give a list for two clients"),
        (tuple(PAIRS[:2]), {}, r"for the data of two clients, give a list: \[\(x, y\), \(x, y\)\]"),
        ({}, {}, "the data of the clients are empty"),
        ([DataLoader(torch_set(PAIRS[0]))] * 2, {}, "cannot read a DataLoader: give the data sets, loader.dataset"),
        ({"a": pd.DataFrame(X), "b": pd.DataFrame(X)}, {}, "tables without named targets: give lamina.data.as_dataset"),
        ([pd.DataFrame(X)] * 3, {}, "tables without named targets"),
        ({"train": PAIRS[0], "test": PAIRS[1]}, {}, "a dict of 'train' and 'test': pass them apart"),
        (PAIRS, {"clients": 3}, r"name the client of every sample .* leave clients out"),
        (PAIRS, {"test": [*PAIRS, PAIRS[0]]}, "client 3 has test data but no training data .clients: 0, 1, 2"),
        ((X, Y), {"test": PAIRS}, "the test data are given client by client, but the training data are not"),
        (PAIRS, {"test": PAIRS, "local_test": 0.5}, "leave local_test out"),
        (PAIRS, {"test": PAIRS, "client_metrics": True}, "give one"),
        ([PAIRS[0], (X[:3, :2], Y[:3])], {}, r"client 1 has x of another shape .\[2\], not \[4\]. than client 0"),
        ([PAIRS[0], (X[:3], Y[:3].float())], {}, "client 1 has targets of another kind"),
        ([PAIRS[0], (X[:3], ["a", "b", "a"])], {}, "labels of client 1 have names, and those of client 0 are num"),
        ({"a": PAIRS[0], "b": (X[:3] / 0, Y[:3])}, {}, "client 'b': data: sample 0 of x holds"),
        ([PAIRS[0], (X[:3].bool(), Y[:3])], {}, "client 1 has x of another type"),
    ],
)  # fmt: skip
def test_what_is_no_data_of_clients_is_refused(data, options, expected):
    with pytest.raises(BadInput, match=expected):
        lamina.Simulation(nn.Linear(4, 3), data, "fedavg", **options)


def test_a_pair_of_two_inputs_is_no_list_of_clients(caplog):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, one, other):
            return self.layer(one + other)

    with caplog.at_level(logging.INFO):
        run = lamina.Simulation(Two(), ((X, X), Y), "fedavg", clients=2)
    assert isinstance(run.train_data.x, tuple)
    assert as_data([X, Y]).client_column is None
    assert as_data([(X, X), Y]).client_column is None


def test_the_column_of_the_clients_must_be_there():
    with pytest.raises(BadInput, match=r"client_column 'b' is no column \(columns: a\)"):
        lamina.Dataset(X, Y, columns={"a": Y.numpy()}, client_column="b")


def test_tables_of_clients_are_prepared_once():
    pandas = pytest.importorskip("pandas")
    tables = [pandas.DataFrame({"ward": list(wards), "y": [0, 1, 1]}) for wards in ("aab", "bcc")]
    options = {"categorical": ["ward"]}
    apart = [lamina.data.as_dataset(table, y="y", preprocessing=options) for table in tables]
    with pytest.raises(BadInput, match="client 1 has another preprocessing of its table"):
        as_data(apart)
    fitted = lamina.data.TablePreprocessing.fit(pandas.concat(tables), [], **options)
    data = as_data([lamina.data.as_dataset(table, y="y", preprocessing=fitted) for table in tables])
    assert data.x.argmax(1).tolist() == [0, 0, 1, 1, 2, 2]
    assert data.preprocessing is fitted


def test_a_function_for_experiment_files_may_return_the_data_of_clients(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wards_of_mine.py").write_text(
        "import torch\n\ndef load():\n    x, y = torch.eye(4), torch.tensor([0, 1, 0, 1])\n"
        "    return {'b': (x, y), 'a': (x[:2], y[:2])}, {'a': (x, y)}\n"
    )
    with pytest.raises(BadInput, match=r"returns the data of each client: add client = \"client\" to \[data\]"):
        lamina.data.load("wards_of_mine:load")
    train, test = lamina.data.load("wards_of_mine:load", client="client")
    assert train.columns["client"].tolist() == ["b"] * 4 + ["a"] * 2
    assert test.client_column == "client"


def test_targets_may_be_tuples_and_dicts():
    clients = [(torch.zeros(n, 2), {"kind": torch.arange(n) % 2, "size": torch.ones(n)}) for n in (2, 3)]
    joined = as_data(clients)
    assert {name: value.tolist() for name, value in joined.y.items()} == {"kind": [0, 1, 0, 1, 0], "size": [1.0] * 5}
    clients[1][1].pop("size")
    with pytest.raises(lamina.BadInput, match="client 1 has other targets"):
        as_data(clients)


def test_clients_with_whole_numbers_as_names_are_in_their_order():
    run = lamina.Simulation(
        nn.Linear(2, 2), {k: (torch.zeros(5 + k, 2), torch.arange(5 + k) % 2) for k in (10, 2, 1)}, "fedavg"
    )
    assert [len(part) for part in run.plan.clients.parts] == [6, 7, 15]


def test_test_data_of_other_clients_are_evaluated_together(caplog):
    samples = (torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    run = lamina.Simulation(nn.Linear(2, 2), [samples] * 3, "fedavg", test=[samples] * 3, clients=3, partition="iid")
    assert not any(name.startswith("client_") for name in run.evaluate())
    assert "dealt to other clients" in caplog.text


def test_two_clients_of_one_name_are_refused():
    first, second = (torch.zeros(3, 2), torch.tensor([0, 1, 0])), (torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(lamina.BadInput, match="two clients have the name '1', as text and as another type"):
        as_data({1: first, "1": second})


@pytest.mark.parametrize(
    "give",
    [
        lambda x: (x, None), lambda x: lamina.Dataset(x, None), lambda x: [(x, None), (x, None)],
        lambda x: {"a": (x, None)}, lambda x: x, lambda x: x.numpy(),
    ],
)  # fmt: skip
def test_samples_without_targets_are_refused_with_what_to_give(give):
    with pytest.raises(lamina.BadInput, match=r"give zeros, \(x, torch.zeros\(len\(x\)\)\)"):
        as_data(give(torch.zeros(3, 2)))
