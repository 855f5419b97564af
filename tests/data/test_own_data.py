"""The user's own data: arrays, lists, tables and tokens of small integers, and what cannot be read."""

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.data import as_dataset
from lamina.data.feed import prepare


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


@pytest.mark.parametrize("shape", [(6, 3, 5, 5), (6, 5, 5)])
def test_images_of_bytes_are_still_intensities(shape):
    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    data = as_dataset((x, np.arange(6) % 2))
    assert data.x.dtype == torch.uint8
    assert data.x.dim() == 4
    assert torch.equal(prepare(data.x, None, None).flatten(), torch.from_numpy(x).flatten().float() / 255)


@pytest.mark.parametrize(("data", "what_to_do"), [
    (([[0.0], [1.0]], ["cat", "dog"]), r"y holds text.*np\.unique\(labels, return_inverse=True\)"),
    ((np.zeros((2, 1)), np.array(["cat", "dog"])), "y holds text"),
    ((np.zeros((2, 1)), np.array(["cat", "dog"], dtype=object)), "y holds text"),
    ((["a text", "another"], [0, 1]), "x holds text.*tokenise"),
    (({"age": [1.0, 2.0], "dose": [3.0, 4.0]}, [0, 1]), "x is a dict.*one array.*np.column_stack"),
    (([{"age": 1.0}, {"age": 2.0}], [0, 1]), "x holds dicts.*one array"),
    (([[1.0], [2.0, 3.0]], [0, 1]), "x is not an array of numbers of one shape"),
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
