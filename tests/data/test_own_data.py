"""The user's own data: arrays, lists, tables and tokens of small integers, and what cannot be read."""

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.data import as_dataset
from lamina.data.feed import prepare
from lamina.data.readers.own import as_splits


class Seen(nn.Module):
    """A model that keeps what it was given."""

    def __init__(self, features=3):
        super().__init__()
        self.linear = nn.Linear(features, 2)
        self.inputs = []

    def forward(self, x):
        self.inputs.append(x)
        return self.linear(x.flatten(1).float())


def test_a_dataset_of_numpy_arrays_or_lists_is_the_one_of_tensors():
    x, y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 1, 0])
    wanted = lamina.Dataset(torch.from_numpy(x), torch.from_numpy(y))
    for data in (lamina.Dataset(x, y), lamina.Dataset(x.tolist(), y.tolist()), lamina.Dataset(x, list(y))):
        assert torch.equal(data.x.double(), wanted.x)
        assert torch.equal(data.y, wanted.y)
        assert data.classes == 2
        assert torch.equal(data.subset([3, 0]).x.double(), wanted.x[[3, 0]])


def test_columns_may_be_lists():
    data = lamina.Dataset(np.zeros((3, 2)), [0, 1, 0], columns={"who": ["a", "b", "a"]})
    assert list(data.subset([2, 1]).columns["who"]) == ["a", "b"]


@pytest.mark.parametrize("shape", [(40, 3), (40,)])
@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_small_integers_of_a_table_reach_the_model_as_they_are(shape, engine):
    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    table = lamina.Dataset(x.reshape(40, -1), np.arange(40) % 2)
    run = lamina.Simulation(Seen(table.x.shape[1]), table, "fedavg", clients=2, engine=engine, device="cpu", lr=1e-4)
    run.run(1)
    given = run.objective.module.inputs[0]
    assert not given.is_floating_point()
    assert given.max() > 1
    assert set(given.flatten().tolist()) <= set(x.flatten().tolist())


def test_tokens_of_small_integers_work_with_an_embedding():
    tokens, labels = np.random.default_rng(0).integers(0, 9, (40, 5)), np.arange(40) % 2

    def trained(x):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 2))
        run = lamina.Simulation(model, (x, labels), "fedlamb", clients=4, device="cpu")
        run.run(2)
        return run.state.server.x

    assert torch.equal(trained(tokens.astype(np.uint8)), trained(tokens.astype(np.int64)))


def test_a_linear_model_on_a_table_of_integers_is_refused_with_what_to_do():
    x = np.random.default_rng(0).integers(0, 9, (40, 5)).astype(np.uint8)
    with pytest.raises(lamina.BadInput, match=r"integers reach the model as they are.*astype\('float32'\)") as error:
        lamina.Simulation(nn.Linear(5, 2), (x, np.arange(40) % 2), "fedavg", clients=4, device="cpu")
    assert "\n" not in str(error.value)


def test_tokens_that_a_model_refuses_for_another_reason_need_not_be_floats():
    class Short(nn.Embedding):
        def forward(self, tokens):
            raise ValueError("the sequences are longer than 4 tokens")

    data = np.zeros((40, 5), dtype=np.int64), np.arange(40) % 2
    with pytest.raises(lamina.BadInput, match=r"longer than 4 tokens \(test_own_data"):
        lamina.Simulation(Short(9, 2), data, "fedavg", clients=4, device="cpu")


@pytest.mark.parametrize("shape", [(6, 3, 5, 5), (6, 5, 5)])
def test_images_of_bytes_are_still_intensities(shape):
    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    data = as_dataset((x, np.arange(6) % 2))
    assert data.x.dtype == torch.uint8
    assert data.x.dim() == 4
    assert torch.equal(prepare(data.x, None, None).flatten(), torch.from_numpy(x).flatten().float() / 255)


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


def test_text_labels_are_numbered_and_the_test_data_follow_the_training_data():
    pandas = pytest.importorskip("pandas")
    labels = pandas.Series(["dog", "cat", "eel", "dog"] * 3)
    run = lamina.Simulation(nn.Linear(2, 3), (torch.randn(12, 2), labels), "fedavg", clients=2, device="cpu",
                            test=(torch.randn(2, 2), ["eel", "dog"]))  # fmt: skip
    assert run.train_data.class_names == ("cat", "dog", "eel")
    assert run.train_data.y[:3].tolist() == [1, 0, 2]
    assert run.test_data.y.tolist() == [2, 1]
    with pytest.raises(lamina.BadInput, match="the class 'fox' appears only in the test data"):
        lamina.Simulation(nn.Linear(2, 3), run.train_data, "fedavg", clients=2, test=(torch.zeros(1, 2), ["fox"]))


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
        ({"y": "price"}, "column 'town' of x holds no numbers"),
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


def test_sequences_are_padded_at_the_end_and_masked_where_the_forward_takes_a_mask():
    class Lengths(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 2), nn.Linear(2, 2)

        def forward(self, ids, lengths, mask):
            assert torch.equal(mask.sum(1), lengths)
            return self.head(self.table(ids).sum(1) / lengths.unsqueeze(1))

    data = lamina.Dataset([[1, 2], [3], [4, 5, 6]], [[1, 1], [0], [1, 0, 1]])
    assert data.x.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert data.y.tolist() == [[1, 1, -100], [0, -100, -100], [1, 0, 1]]
    assert data.mask.sum(1).tolist() == [2, 1, 3]
    run = lamina.Simulation(Lengths(), ([[1, 2], [3], [4, 5, 6]], [0, 1, 0]), "fedavg", clients=1, device="cpu")
    assert list(run.train_data.x) == ["ids", "mask", "lengths"]
    assert run.train_data.x["lengths"].tolist() == [2, 1, 3]
    run.run(1)


class Pair(nn.Module):
    """A question and an answer, each with its own length."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 2), nn.Linear(2, 2)

    def forward(self, question, answer, question_mask=None, answer_lengths=None):
        asked = (self.table(question) * question_mask.unsqueeze(2)).sum(1)
        return self.head(asked + self.table(answer).sum(1) / answer_lengths.unsqueeze(1))


class SharedMask(Pair):
    def forward(self, question, answer, mask=None):
        return super().forward(question, answer, mask, mask.sum(1))


QUESTIONS, ANSWERS = [[1, 2], [3], [4, 5, 6]], [[1], [2, 3, 4, 5], [6]]


@pytest.mark.parametrize("x", [{"question": QUESTIONS, "answer": ANSWERS}, (QUESTIONS, ANSWERS)], ids=["dict", "tuple"])
def test_two_padded_inputs_have_a_mask_each(x):
    data = lamina.Dataset(x, [0, 1, 0])
    for given, rows in ((data, [0, 1, 2]), (data.subset([1, 2]), [1, 2])):
        run = lamina.Simulation(Pair(), given, "fedavg", clients=1, device="cpu")
        assert run.train_data.x["question_mask"].sum(1).tolist() == [len(QUESTIONS[i]) for i in rows]
        assert run.train_data.x["answer_lengths"].tolist() == [len(ANSWERS[i]) for i in rows]
    with pytest.raises(lamina.BadInput, match="lists of question and answer differ in length"):
        lamina.Simulation(SharedMask(), data, "fedavg", clients=1)


def test_sequences_of_one_length_have_a_mask_where_the_module_needs_it():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

        def forward(self, ids, age, lengths):
            return self.head(self.table(ids).sum(1) / lengths.unsqueeze(1)) + age

    x = {"ids": QUESTIONS, "age": np.zeros((3, 1))}
    equal = {"ids": [[1, 2], [3, 4]], "age": np.zeros((2, 1))}
    run = lamina.Simulation(Mean(), (x, [0, 1, 0]), "fedavg", test=(equal, [0, 1]), clients=1, device="cpu")
    assert run.test_data.x["lengths"].tolist() == [2, 2]


def test_padded_inputs_of_the_same_lengths_share_a_mask():
    x = {"question": QUESTIONS, "answer": QUESTIONS}
    shared = lamina.Simulation(SharedMask(), (x, [0, 1, 0]), "fedavg", clients=1, device="cpu")
    assert shared.train_data.x["mask"].sum(1).tolist() == [2, 1, 3]
    each = lamina.Simulation(Pair(), (x, [0, 1, 0]), "fedavg", clients=1, device="cpu")
    assert each.train_data.x["answer_lengths"].tolist() == [2, 1, 3]


@pytest.mark.parametrize("make", [lamina.Dataset, lambda x, y: as_dataset((x, y))])
def test_pandas_rows_in_another_order_are_refused(make):
    pandas = pytest.importorskip("pandas")
    x, y = pandas.DataFrame({"a": [1.0, 2.0]}, index=[7, 8]), pandas.Series([0, 1], index=[8, 7])
    with pytest.raises(lamina.BadInput, match=r"same index in another order; give y\.loc\[x\.index\]"):
        make(x, y)
    assert make(x, y.loc[x.index]).y.tolist() == [1, 0]
    assert make(x, y.reset_index(drop=True)).y.tolist() == [0, 1]  # other labels: by place


def test_another_ignored_value_is_stored_as_minus_one_hundred():
    data = lamina.Dataset(torch.zeros(2, 1, 2, 2), torch.tensor([[[0, 255], [1, 1]]] * 2), ignore_index=255)
    assert data.classes == 2
    assert data.y[0].tolist() == [[0, -100], [1, 1]]
    assert data.labels is None
    for y in (torch.tensor([0, 255]), torch.tensor([[0.0, -1.0], [1.0, 0.0]])):  # where it would have no effect
        with pytest.raises(lamina.BadInput, match="ignore_index is for integer maps"):
            lamina.Dataset(torch.zeros(2, 3), y, ignore_index=255)


def test_a_function_may_return_token_labels_of_different_length():
    train, test = as_splits("m:load", (([[1, 2], [3]], [[1, 0], [1]]), ([[1, 4]], [[1, 0]])))
    assert (train.y.tolist(), test.y.tolist()) == ([[1, 0], [1, -100]], [[1, 0]])


def test_a_function_may_return_datasets_that_number_their_classes_differently():
    x = torch.zeros(3, 2)
    train, test = as_splits("m:load", (lamina.Dataset(x, ["a", "b", "c"]), lamina.Dataset(x[:2], ["a", "c"])))
    assert (test.y.tolist(), test.class_names) == ([0, 2], train.class_names)


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
