"""The user's own data on their way to the model: small integers, text labels, and padded sequences with masks."""

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
