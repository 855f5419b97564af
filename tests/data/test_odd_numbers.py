"""Whole numbers of every type and size, and odd values in files: they arrive as they are, or are refused in a line."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import lamina
from lamina.base.errors import BadInput
from lamina.data import as_dataset, load
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


def test_large_numbers_of_a_table_stay_positive(tmp_path):
    large = np.array([2**63, 2**64 - 2048] * 4, np.uint64)
    table = pd.DataFrame({"feature": large, "target": large, "site": large})
    table.to_csv(tmp_path / "table.csv", index=False)
    options = {"path": str(tmp_path / "table.csv"), "label": "target", "client": "site"}
    train, _ = load("table", **options, task="regression")
    assert set(train.y.tolist()) == {2.0**63, 2.0**64}
    assert set(train.x.flatten().tolist()) == {2.0**63, 2.0**64}
    assert set(train.columns["site"].tolist()) == set(large.tolist())
    assert load("table", **options).train.class_names == ("9223372036854775808", "18446744073709549568")


# --- odd values in files ----------------------------------------------------------------------------------------------


def test_whole_floats_beyond_int64_are_no_classes(tmp_path):
    """They would all be the class of the smallest int64."""
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 2)), y=np.array([1e300, -1e300, 1e20, 1.0]))
    with pytest.raises(BadInput, match="the label holds fractions"):
        load("arrays", path=str(tmp_path / "data.npz"), test=0.5, task="classification")


def test_a_number_of_400_digits_in_a_table_names_its_row(tmp_path):
    file = tmp_path / "table.csv"
    for huge in (str(HUGE), f"-{HUGE}"):
        file.write_text("a,b\n1,0\n" + f"{huge},1\n" + "2,0\n3,1\n")
        problem = "(holds no number in row 2 .*, a number of 1329 bits|holds text)"  # the latter with pandas 2
        with pytest.raises(BadInput, match=f"column 'a' {problem}"):
            load("table", path=str(file), label="b", test=0.5)


@pytest.mark.parametrize("size", [[-1, 5], [0, 4], [4], [4, 4, 4]])
def test_a_size_that_no_picture_has_is_refused(tmp_path, size):
    for name in "ab":
        (tmp_path / name).mkdir()
    with pytest.raises(BadInput, match=r"data\.size = .*: must be a height and a width"):
        load("images", path=str(tmp_path), size=size)
