"""Recurrent layers in the stacked engine give the loop's trajectory."""

import pytest
import torch
from torch import nn

from stacked_layers import Recurrent, assert_as_in_the_loop, data


class Cells(nn.Module):
    """A cell that the model itself calls at every time step."""

    def __init__(self, cell, **options):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(11, 4), cell(4, 5, **options), nn.Linear(5, 3)

    def forward(self, tokens):
        state = None
        for word in self.words(tokens).unbind(1):
            state = self.cell(word, state)
        return self.head(state[0] + state[1] if isinstance(state, tuple) else state)


WORDS = {
    "LSTM": lambda: Recurrent(nn.LSTM, 5, batch_first=True),
    "LSTM, two layers and directions": lambda: Recurrent(nn.LSTM, 10, num_layers=2, bidirectional=True, bias=False),
    "LSTM with a projection": lambda: Recurrent(nn.LSTM, 3, proj_size=3, batch_first=True),
    "GRU": lambda: Recurrent(nn.GRU, 10, bidirectional=True, batch_first=True),
    "GRU from a state": lambda: Recurrent(nn.GRU, 5, start=True),
    "RNN": lambda: Recurrent(nn.RNN, 5, num_layers=2, batch_first=True),
    "RNN with ReLU": lambda: Recurrent(nn.RNN, 5, nonlinearity="relu", batch_first=True),
    "LSTMCell": lambda: Cells(nn.LSTMCell),
    "LSTMCell without a bias": lambda: Cells(nn.LSTMCell, bias=False),
    "GRUCell": lambda: Cells(nn.GRUCell),
    "RNNCell": lambda: Cells(nn.RNNCell),
}


@pytest.mark.long
@pytest.mark.parametrize("make", WORDS.values(), ids=WORDS.keys())
def test_layers_of_words(make):
    assert_as_in_the_loop(make, data())


def test_a_recurrent_layer_on_the_path_of_a_gpu():
    assert_as_in_the_loop(WORDS["LSTM"], data(), gpu_path=True)


class Packed(Recurrent):
    """A packed sequence of whole samples."""

    def forward(self, tokens):
        lengths = torch.full((len(tokens),), tokens.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(self.words(tokens), lengths, batch_first=True)
        return self.head(self.layer(packed)[1][0][-1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Packed(nn.LSTM, 5, batch_first=True),
        lambda: Recurrent(nn.GRU, 5, num_layers=2, dropout=0.5, batch_first=True),
    ],
)
def test_options_without_a_stacked_form_run_in_the_loop(make):
    assert_as_in_the_loop(make, data(), "loop", captured=False)  # they draw or read values
