"""Arrays, lists, tables and torch data sets become tensors, or are refused in one line."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import lamina
from lamina.base.errors import BadInput
from lamina.data import as_dataset
from lamina.data.dataset import Dataset
from lamina.data.readers.own import as_splits

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
TOO_LARGE = "(a whole number too large for int64|numbers beyond 64 bits|int too (large|big) to convert)"
HUGE = 10**400
LABELS = [0, 1, 0, 1]


class Tokens(nn.Module):
    """An embedding of two inputs, which records the types that it receives."""

    def __init__(self):
        super().__init__()
        self.words, self.head, self.received = nn.Embedding(9, 3), nn.Linear(3, 2), set()

    def forward(self, ids, kinds):
        self.received |= {ids.dtype, kinds.dtype}
        return self.head(self.words(ids).mean(1) + self.words(kinds))


# --- integers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_array", [False, True], ids=["tensor", "array"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_reach_the_model_as_int64(dtype, as_array):
    values = torch.arange(16).to(dtype)
    for shape in ((16,), (8, 2), (4, 2, 2), (2, 1, 2, 4)):
        given = values.reshape(shape)
        data = Dataset(given.numpy() if as_array else given, torch.arange(len(given)) % 2)
        is_image = dtype == torch.uint8 and len(shape) > 2
        inputs = data.inputs(slice(None))
        assert inputs.dtype == (torch.float32 if is_image else torch.int64)
        assert is_image or torch.equal(inputs, torch.arange(16).reshape(shape))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_an_embedding_takes_all_integers(dtype, engine):
    """Of a tuple and of a dict, with one axis and with two."""
    ids, kinds = torch.arange(48).reshape(12, 4) % 9, torch.arange(12) % 9

    def weights(kind):
        inputs = ids.to(kind), kinds.to(kind)
        results = []
        for x in (inputs, dict(zip(("ids", "kinds"), inputs, strict=True))):
            torch.manual_seed(0)
            run = lamina.Simulation(Tokens(), (x, torch.arange(12) % 2), "fedavg", clients=3, engine=engine, lr=0.1)
            run.run(1)
            assert run.model.received == {torch.int64}
            results.append(run.model.words.weight.detach())
        assert torch.equal(*results)
        return results[0]

    assert torch.equal(weights(dtype), weights(torch.int64))


def test_booleans_stay_booleans():
    for given in (torch.tensor([[True], [False]]), np.array([[True], [False]])):
        assert Dataset(given, [0, 1]).inputs(slice(None)).dtype == torch.bool


@pytest.mark.parametrize("given", [
    np.full((4, 2), 2**63, np.uint64),
    torch.from_numpy(np.full((4, 2), 2**64 - 1, np.uint64)),
    [torch.from_numpy(np.full(2, 2**63, np.uint64))] * 4,
    {"ids": np.full((4, 2), 2**63, np.uint64)},
    (np.full((4, 2), 2**63, np.uint64), np.zeros(4)),
    [[2**63], [1, 2], [3], [4]],
    [[2**64], [1], [2], [3]],
    [[-(2**63) - 1], [1], [2], [3]],
    [[HUGE], [1], [2], [3]],
    [[HUGE], [0.5], [2], [3]],
    pd.DataFrame({"a": np.full(4, 2**63, np.uint64)}),
])  # fmt: skip
def test_whole_numbers_beyond_int64_are_refused(given):
    with pytest.raises(BadInput, match=TOO_LARGE) as refused:
        as_dataset((given, LABELS))
    assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match=TOO_LARGE):
        as_splits("m:load", ((given, LABELS), (given, LABELS)))


@pytest.mark.parametrize("labels", [np.full(4, 2**63, np.uint64), torch.full((4,), 2**63, dtype=torch.uint64),
                                    [HUGE, 0, 1, 1], [[2**63], [1], [2], [3, 4]]])  # fmt: skip
def test_labels_beyond_int64_are_refused(labels):
    with pytest.raises(BadInput, match=f"y .*{TOO_LARGE}"):
        as_dataset((torch.zeros(4, 2), labels))


def test_a_hub_data_set_refuses_whole_numbers_beyond_int64():
    datasets = pytest.importorskip("datasets")
    values = datasets.Sequence(datasets.Value("uint64"))
    features = datasets.Features({"x": values, "label": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({"x": [[2**63, 2**63]] * 4, "label": LABELS}, features=features)
    with pytest.raises(BadInput, match=TOO_LARGE):
        as_dataset(data)


# --- arrays, lists and samples ----------------------------------------------------------------------------------------


def test_a_dataset_of_numpy_arrays_or_lists_is_the_one_of_tensors():
    x, y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 1, 0])
    wanted = lamina.Dataset(torch.from_numpy(x), torch.from_numpy(y))
    for data in (lamina.Dataset(x, y), lamina.Dataset(x.tolist(), y.tolist()), lamina.Dataset(x, list(y))):
        assert torch.equal(data.x.double(), wanted.x)
        assert torch.equal(data.y, wanted.y)
        assert data.classes == 2
        assert torch.equal(data.subset([3, 0]).x.double(), wanted.x[[3, 0]])


@pytest.mark.parametrize(("data", "what_to_do"), [
    (([[0.0], [1.0]], [["cat"], ["dog"]]), "y holds text.*one text label per sample"),
    ((["a text", "another"], [0, 1]), "x holds text.*tokenise"),
    (([[1.0], [[2.0], [3.0]]], [0, 1]), "x is not an array of numbers of one shape"),
    ({"x": [[1.0], [2.0]], "y": [0, 1]}, r"type dict.*pair \(x, y\)"),
])  # fmt: skip
def test_data_that_are_no_arrays_say_what_to_do_in_one_line(data, what_to_do):
    makers = [lambda: as_dataset(data), lambda: lamina.Simulation(nn.Linear(1, 2), data, "fedavg", device="cpu")]
    if isinstance(data, tuple):
        makers.append(lambda: lamina.Dataset(*data))
    for make in makers:
        with pytest.raises(lamina.BadInput, match=what_to_do) as error:
            make()
        assert "\n" not in str(error.value)
        assert str(error.value).count("data: ") <= 1


class Pairs(torch.utils.data.Dataset):
    """A map-style data set of these samples."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


A, B = torch.arange(6.0).reshape(3, 2), torch.tensor([4, 5, 6])


@pytest.mark.parametrize(("data", "kind"), [
    (Pairs([(A[i], i % 2) for i in range(3)]), "tensor"),
    (torch.utils.data.Subset(Pairs([(A[i], torch.tensor(i % 2)) for i in range(3)]), [0, 1, 2]), "tensor"),
    (([A[0], A[1], A[2]], [0, 1, 0]), "tensor"),
    (((A[0], A[1], A[2]), (0, 1, 0)), "tensor"),
    (Pairs([((A[i], B[i]), i % 2) for i in range(3)]), "tuple"),
    (Pairs([(A[i].numpy(), int(B[i]), i % 2) for i in range(3)]), "tuple"),
    (Pairs([[A[i], B[i], i % 2] for i in range(3)]), "tuple"),
    (torch.utils.data.TensorDataset(A, B, torch.tensor([0, 1, 0])), "tuple"),
    (((A.tolist(), B.numpy()), [0, 1, 0]), "tuple"),
    (Pairs([{"a": A[i], "b": B[i], "label": i % 2} for i in range(3)]), "dict"),
    (Pairs([({"a": A[i], "b": B[i]}, i % 2) for i in range(3)]), "dict"),
    (([{"a": A[i].tolist(), "b": int(B[i])} for i in range(3)], [0, 1, 0]), "dict"),
    (({"a": A.tolist(), "b": B.numpy()}, [0, 1, 0]), "dict"),
])  # fmt: skip
def test_every_way_to_give_samples_gives_the_same_tensors(data, kind):
    read = as_dataset(data)
    x = {"tensor": [read.x], "tuple": read.x, "dict": read.x.values() if kind == "dict" else None}[kind]
    for values, expected in zip(x, (A, B), strict=False):
        assert torch.equal(values.to(expected.dtype), expected)
    assert read.y.tolist() == [0, 1, 0]
    assert list(read.x) == ["a", "b"] if kind == "dict" else True
    assert torch.equal(as_dataset(read.subset([2])).inputs(slice(1)) if kind == "tensor" else A[2:], A[2:])


def test_read_only_arrays_are_copied():
    x = np.zeros((2, 3), np.float32)
    x.flags.writeable = False
    data = as_dataset((x, [0, 1]))
    data.x[0, 0] = 1.0
    assert x[0, 0] == 0


def test_a_missing_label_is_no_class_of_its_own():
    for y in (["u", float("nan"), "v"], ["u", None, "v"]):
        with pytest.raises(BadInput, match="sample 1 has no label"):
            Dataset(np.zeros((3, 2)), y)
    with pytest.raises(BadInput, match=r"training data of 'm:f': .*sample 1 has no label"):
        as_splits("m:f", ((np.zeros((2, 1)), np.array(["u", np.nan], object)), (np.zeros((1, 1)), ["u"])))


# --- tables of pandas -------------------------------------------------------------------------------------------------


def test_a_pandas_table_gives_features_targets_and_columns_to_split_by():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(
        {"rooms": [3, 2, 4, 1], "area": [70.0, 50.5, 90.0, 30.0], "town": list("abab"), "price": [3.5, 2.5, 4.5, 1.5]}
    )
    data = as_dataset(table, y="price", columns=["town"])
    assert data.x.dtype == torch.float32
    assert data.x[1].tolist() == [2.0, 50.5]
    run = lamina.Simulation(nn.Linear(2, 1), data, "fedavg", partition=lamina.data.ByColumn("town"), loss="mae",
                            device="cpu")  # fmt: skip
    assert run.plan.clients.count == 2
    split = lamina.Simulation(nn.Linear(2, 1), as_dataset(table, y="price", columns="town").holdout(0.25), "fedavg",
                              partition=lamina.data.ByColumn("town"), loss="mae", device="cpu")  # fmt: skip
    assert (len(split.train_data), len(split.test_data)) == (3, 1)
    with pytest.raises(lamina.BadInput, match=r"give partition=lamina\.data\.ByColumn\('town'\)"):
        lamina.Simulation(nn.Linear(2, 1), data, "fedavg", clients="town", loss="mae")
    for options, message in (
        ({"y": "prize"}, "no column 'prize'; did you mean 'price'"),
        ({}, "name the target column"),
        ({"y": "price"}, "column 'town' holds no number in row 1 .*: .*list the column in categorical"),
    ):
        with pytest.raises(lamina.BadInput, match=message):
            as_dataset(table, **options)
    for column, value, kind in (
        ("area", np.nan, "a missing"),
        ("price", np.nan, "a missing"),
        ("area", -np.inf, "an inf"),
    ):
        damaged = table.copy()
        damaged.loc[2, column] = value
        with pytest.raises(lamina.BadInput, match=f"column '{column}' has {kind}.* in row 3 .counted from 1 below the"):
            as_dataset(damaged, y="price", columns="town")
    as_dataset(table.assign(town=None), y="price", columns="town")  # not used


@pytest.mark.parametrize("make", [lamina.Dataset, lambda x, y: as_dataset((x, y))])
def test_pandas_rows_in_another_order_are_refused(make):
    pandas = pytest.importorskip("pandas")
    x, y = pandas.DataFrame({"a": [1.0, 2.0]}, index=[7, 8]), pandas.Series([0, 1], index=[8, 7])
    with pytest.raises(lamina.BadInput, match=r"same index in another order; give y\.loc\[x\.index\]"):
        make(x, y)
    assert make(x, y.loc[x.index]).y.tolist() == [1, 0]
    assert make(x, y.reset_index(drop=True)).y.tolist() == [0, 1]  # other labels: by place


@pytest.mark.parametrize(
    ("change", "y", "message"),
    [
        (lambda table: table, "a", None),
        (lambda table: table.set_axis([4], axis=1), "4", None),
        (lambda table: table.set_axis([4], axis=1), 4, None),
        (lambda table: table, ["a", "c"], "several targets are given as arrays"),
    ],
)
def test_columns_of_pandas(change, y, message):
    pandas = pytest.importorskip("pandas")
    table = change(pandas.DataFrame({"a": [1.0, 2.0]}))
    table["c"] = [0.5, 0.25]
    if message is None:
        assert as_dataset(table, y=y).y.tolist() == [1.0, 2.0]
    else:
        with pytest.raises(lamina.BadInput, match=message):
            as_dataset(table, y=y)


def test_two_columns_of_one_name_are_refused():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame([[1.0, 2.0, 3.0]], columns=["a", "a", "b"])
    with pytest.raises(lamina.BadInput, match="two columns 'a': rename or drop one"):
        as_dataset(table, y="b")
