"""Inputs that the model's forward does not take, ids that its embeddings lack, and padding that it cannot see."""

import pytest
import torch
from torch import nn

import lamina
from kinds import Text, TwoInputs, draw, integers

X, Y = draw(12, 4), integers(3, 12)
LABELS = torch.arange(48) % 3


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.words(ids).mean(1))


def tokens():
    return torch.randint(0, 11, (48, 6), generator=torch.Generator().manual_seed(1)), LABELS


def simulate(model, data, **settings):
    return lamina.Simulation(model.double(), data, "fedavg", clients=2, device="cpu", **settings)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: simulate(Text(True), ({"ids": integers(8, 12, 3), "attention_mask": X}, Y % 2)),
     r"an input 'ids', which the model's forward does not take.*it takes input_ids, attention_mask"),
    (lambda: simulate(TwoInputs(), ({"numbers": X}, Y)), "the train data lack the input 'kind'.*they have numbers"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(make, message):
    with pytest.raises(lamina.BadInput, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("engine", ["auto", "stacked", "captured", "loop"])
@pytest.mark.parametrize("bad", [57, -1])
def test_a_token_outside_the_vocabulary_is_named(engine, bad):
    x, y = tokens()
    x[40, 2] = bad
    text = rf"layer 'words' \(Embedding\) gets the id {bad} from the train data, but its rows are 0 to 10: map"
    with pytest.raises(lamina.BadInput, match=text):
        simulate(Words(), (x, y), engine=engine)
    with pytest.raises(lamina.BadInput, match=text.replace("train", "test")):
        simulate(Words(), tokens(), engine=engine, test=(x, y))


def test_sequences_that_are_longer_than_the_position_embedding_are_named():
    class Placed(nn.Module):
        def __init__(self, positions):
            super().__init__()
            self.words, self.places, self.head = nn.Embedding(11, 4), nn.Embedding(positions, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head((self.words(x) + self.places(torch.arange(x.shape[1]))).mean(1))

    x, y = tokens()
    simulate(Placed(x.shape[1]), (x, y)).run(1)
    message = rf"layer 'places' \(Embedding\) gets the id {x.shape[1] - 1} from the train data, but .* shorten"
    with pytest.raises(lamina.BadInput, match=message):
        simulate(Placed(3), (x, y))


def test_ids_that_do_not_occur_together_are_fine():
    class Pairs(nn.Module):
        """The id is made of two columns, whose largest values no sample has at once."""

        def __init__(self):
            super().__init__()
            self.pairs, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.pairs(x[:, 0] + x[:, 1]))

    x = torch.arange(48).unsqueeze(1) % 10
    simulate(Pairs(), (torch.cat([x, 9 - x], 1), LABELS)).run(1)
    with pytest.raises(lamina.BadInput, match=r"layer 'pairs' .* gets the id 11 "):
        simulate(Pairs(), (torch.cat([x, 11 - x], 1), LABELS))


class Masked(Words):
    def forward(self, ids, mask):
        return self.head((self.words(ids) * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True))


RAGGED = [list(range(1, 2 + i % 5)) for i in range(48)]


def warnings(caplog, model, data):
    """Return what a simulation says before round 1, and in it."""
    simulate(model, data, test=data).run(1)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_padding_that_the_model_cannot_see_is_mentioned(caplog):
    (said,) = warnings(caplog, Words(), (RAGGED, LABELS))
    assert "padded with 0, which the model takes for values: let its forward take 'attention_mask'" in said


def test_padding_with_a_mask_is_not(caplog):
    assert warnings(caplog, Masked(), (RAGGED, LABELS)) == []
    assert warnings(caplog, Words(), ([[1, 2, 3]] * 48, LABELS)) == []


class Counting(nn.Embedding):
    """A table of positions that takes the tokens only to count them, as that of BART does."""

    def forward(self, ids):
        return super().forward(torch.arange(ids.shape[1]).expand(len(ids), -1))


class OfTables(nn.Module):
    """Positions, and a table of words that no layer holds."""

    def __init__(self, positions=6, words=11):
        super().__init__()
        self.places, self.table = Counting(positions, 4), nn.Parameter(torch.zeros(words, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        return self.head((nn.functional.embedding(ids, self.table) + self.places(ids)).mean(1))


def test_ids_are_compared_with_the_tables_that_they_are_read_from():
    simulate(OfTables(), tokens()).run(1)
    with pytest.raises(
        lamina.BadInput, match=r"layer 'places' \(Counting\) gets the id 5 .* rows are 0 to 4: .* shorten"
    ):
        simulate(OfTables(positions=5), tokens())
    with pytest.raises(lamina.BadInput, match=r"the table 'table' gets the id 10 .* rows are 0 to 8: map the ids"):
        simulate(OfTables(words=9), tokens())
