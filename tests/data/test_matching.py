"""Test data are matched to the training data: columns by name, classes by name, images by type and normalisation."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.api.describe import describe
from lamina.data import as_dataset
from lamina.data.readers.own import as_splits

LABELS = np.arange(12) % 3
X = np.random.default_rng(0).normal(size=(12, 2)).astype("float32")
IMAGES = np.random.default_rng(0).integers(0, 256, size=(12, 1, 2, 2)).astype("uint8")
NORMALISATION = {"mean": (0.5,), "std": (0.25,)}


def simulate(train, test, model=None):
    return lamina.Simulation(model or nn.Linear(2, 3), train, "fedavg", test=test, clients=2, device="cpu")


def simulate_images(train, test):
    return simulate(train, test, nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))


# --- columns of tables -------------------------------------------------------------------------------------------


def tables():
    table = pytest.importorskip("pandas").DataFrame(X, columns=["a", "b"])
    return table, table[["b", "a"]]


def as_pair(table):
    return table, LABELS


def as_own_dataset(table):
    return lamina.Dataset(table, LABELS)


def as_read_table(table):
    return as_dataset(table.assign(label=LABELS), y="label")


@pytest.mark.parametrize("make_train", [as_pair, as_own_dataset, as_read_table])
@pytest.mark.parametrize("make_test", [as_pair, as_own_dataset, as_read_table])
def test_columns_of_two_tables_are_matched_by_name(make_train, make_test):
    table, turned = tables()
    model = nn.Linear(2, 3)
    run, expected = (simulate(make_train(table), make_test(test), model) for test in (turned, table))
    assert torch.equal(run.test_data.x, torch.from_numpy(X))
    assert run.evaluate() == expected.evaluate()


def test_columns_are_matched_by_name_in_parts_and_other_forms_of_the_data():
    table, turned = tables()
    train, test = as_splits("m:load", ((table, LABELS), (turned, LABELS)))  # of a user's function
    assert torch.equal(test.x, train.x)
    part = as_dataset((turned, LABELS)).subset(range(6))
    assert torch.equal(simulate((table, LABELS), part).test_data.x, torch.from_numpy(X[:6]))
    _, test = as_splits("m:load", (({"one": table, "two": X}, LABELS), ({"one": turned, "two": X}, LABELS)))
    assert torch.equal(test.x["one"], test.x["two"])
    _, test = as_splits("m:load", (((table, X), LABELS), ((turned, X), LABELS)))
    assert torch.equal(test.x[0], test.x[1])


def test_columns_of_targets_are_matched_by_name():
    table, turned = tables()
    _, test = as_splits("m:load", ((X, table), (X, turned)))
    assert torch.equal(test.y, torch.from_numpy(X))


def test_columns_of_a_table_and_an_array_are_matched_by_place():
    table, turned = tables()
    for train, test in ((table, X), (X, table), (turned, X)):
        assert torch.equal(simulate((train, LABELS), (test, LABELS)).test_data.x, torch.from_numpy(X))


def test_names_of_columns_that_were_replaced_do_not_count():
    table, _ = tables()
    data = dataclasses.replace(as_dataset((table, LABELS)), x=torch.ones(12, 3))
    assert simulate(data, (torch.ones(12, 3), LABELS), nn.Linear(3, 3)).test_data.x.shape == (12, 3)
    assert not data.column_names


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["a", "c"], r"^x of the test data has other columns .* \('b'\): give both the same columns, or "),
        (["a", "b", "c"], r"^x of the test data has other columns .* \('c'\): give both the same columns, or "),
        ([0, 1], r"has other columns .* \('a'\)"),
    ],
)
def test_other_columns_are_refused(columns, message):
    table, _ = tables()
    other = type(table)(np.ones((12, len(columns)), "float32"), columns=columns)
    with pytest.raises(lamina.BadInput, match=message):
        simulate((table, LABELS), (other, LABELS))


def test_two_columns_of_one_name_in_another_order_are_refused():
    table, _ = tables()
    train, test = (type(table)(np.ones((12, 3), "float32"), columns=list(names)) for names in ("aab", "aba"))
    with pytest.raises(lamina.BadInput, match=r"or two of one name \('a'\)"):
        simulate((train, LABELS), (test, LABELS), nn.Linear(3, 3))
    simulate((train, LABELS), (train, LABELS), nn.Linear(3, 3))


# --- images ------------------------------------------------------------------------------------------------------


def test_a_pair_takes_the_normalisation_of_the_training_data():
    train = lamina.Dataset(IMAGES, LABELS, **NORMALISATION)
    expected = simulate_images(train, lamina.Dataset(IMAGES, LABELS, **NORMALISATION)).test_data
    for test in ((IMAGES, LABELS), torch.utils.data.TensorDataset(torch.tensor(IMAGES), torch.tensor(LABELS))):
        given = simulate_images(train, test).test_data
        assert torch.equal(given.inputs(slice(12)), expected.inputs(slice(12)))
    columns = {"who": LABELS}
    for test in ((IMAGES, LABELS), (IMAGES, LABELS, columns)):  # of a user's function
        assert as_splits("m:load", (train, test)).test.mean == (0.5,)
    assert describe("mlp", train, "fedavg", test=(IMAGES, LABELS), settings={}).objects.data.test.std == (0.25,)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (NORMALISATION, {}),
        ({}, NORMALISATION),
        (NORMALISATION, NORMALISATION | {"mean": (0.4,)}),
        (NORMALISATION, NORMALISATION | {"std": (0.2,)}),
    ],
)
def test_another_normalisation_is_refused(train, test):
    train, test = (lamina.Dataset(IMAGES, LABELS, **options) for options in (train, test))
    with pytest.raises(lamina.BadInput, match=r"^the images have (mean|std) = .*: give both the same, or"):
        simulate_images(train, test)
    with pytest.raises(lamina.BadInput, match="in the test data: give both the same, or"):
        as_splits("m:load", (train, test))


@pytest.mark.parametrize("options", [{}, NORMALISATION])
def test_bytes_beside_floats_are_refused(options):
    images, floats = lamina.Dataset(IMAGES, LABELS, **options), (IMAGES / np.float32(255), LABELS)
    for train, test in ((images, floats), (floats, images)):
        with pytest.raises(lamina.BadInput, match=r"^x is torch\.\w+ in the training data and torch\.\w+ in the test"):
            simulate_images(train, test)


# --- labels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["1", "2", "3"], ["cat", "dog", "eel"]])
def test_text_labels_beside_numbers_are_refused(names):
    text = np.array(names)[LABELS]
    for numbers in (LABELS, LABELS + 1, LABELS.astype("float32")):
        for train, test, kinds in ((text, numbers, "training.*test"), (numbers, text, "test.*training")):
            with pytest.raises(lamina.BadInput, match=f"^the {kinds} labels are numbers: give names in both, or"):
                simulate((X, train), (X, test), nn.Linear(2, 4))
            with pytest.raises(lamina.BadInput, match="labels are names of classes"):
                as_splits("m:load", ((X, train), (X, test)))


def test_text_labels_of_eleven_numbers_beside_numbers_are_refused():
    labels = np.arange(12) % 11  # sorted as text, "10" comes before "2"
    for numbers in (labels, LABELS):  # also if the training data have fewer classes
        with pytest.raises(lamina.BadInput, match="labels are names of classes"):
            simulate((X, numbers), (X, labels.astype(str)), nn.Linear(2, 11))


def test_labels_of_a_file_beside_numbers_are_refused(tmp_path):
    np.savez(tmp_path / "rows.npz", x=X, y=LABELS + 1)
    train, test = lamina.data.load("arrays", path=str(tmp_path / "rows.npz"))  # numbered from 0
    simulate(train, test)
    with pytest.raises(lamina.BadInput, match="labels are names of classes"):
        simulate(train, (X, np.minimum(LABELS + 1, 2)))


def test_numbers_of_named_classes_are_accepted():
    names = ["eel", "cat", "dog"]
    text = np.array(names)[LABELS]
    for train, test in [
        (lamina.Dataset(X, LABELS, class_names=names), (X, LABELS)),
        ((X, LABELS), lamina.Dataset(X, LABELS, class_names=names)),
        (lamina.Dataset(X, LABELS, class_names=names), (X, text)),
        ((X, LABELS), (X, LABELS.astype(str))),  # "0", "1" and "2" have the numbers that they say
        ((X, LABELS.astype(str)), (X, LABELS)),
    ]:
        assert simulate(train, test).test_data.y.tolist() == LABELS.tolist()
    run = simulate((X, text), lamina.Dataset(X, LABELS, class_names=names))
    assert run.test_data.y.tolist() == run.train_data.y.tolist()


# --- other ways to give data -------------------------------------------------------------------------------------


def test_a_comparison_matches_test_data(tmp_path):
    table, turned = tables()
    settings = {"rounds": 1, "clients": 2, "device": "cpu"}

    def losses(test, name):
        results = lamina.compare(lambda: nn.Linear(2, 3), (table, LABELS), ["fedavg"], test=test, lr=0.1,
                                 out=tmp_path / name, **settings)  # fmt: skip
        return [row["loss"] for history in results.histories["fedavg"] for row in history]

    assert losses((turned, LABELS), "turned") == losses((table, LABELS), "table")
    with pytest.raises(lamina.BadInput, match="labels are names of classes"):
        losses((table, np.array(["a", "b", "c"])[LABELS]), "labels")
