"""What lamina does with a user's model and data in silence elsewhere is said in one warning."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset

import lamina

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def warnings(caplog, model, data, **more):
    """Return what a simulation says before round 1, and in it."""
    settings = {"clients": 3, "batch_size": 4, "device": "cpu", "test": data}
    lamina.Simulation(model, data, "fedavg", **settings | more).run(1)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


class Returns(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.layer, self.result = nn.Linear(4, 3), result

    def forward(self, x):
        return self.result(self.layer(x))


@pytest.mark.parametrize("result", [lambda h: (h, 2 * h), lambda h: [h, h, h], lambda h: (h, "state")])
def test_outputs_that_are_ignored_are_counted(caplog, result):
    (said,) = warnings(caplog, Returns(result), (X, Y))
    count = len(result(X))
    assert said == f"the model returns {count} values: the loss and the metrics get the first, the others are ignored"


@pytest.mark.parametrize("result", [lambda h: h, lambda h: (h,), lambda h: {"logits": h, "hidden": h}])
def test_one_output_needs_no_warning(caplog, result):
    assert warnings(caplog, Returns(result), (X, Y)) == []


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.words(ids).mean(1))


class Masked(Words):
    def forward(self, ids, mask):
        return self.head((self.words(ids) * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True))


RAGGED = [list(range(1, 2 + i % 5)) for i in range(24)]


def test_padding_that_the_model_cannot_see_is_mentioned(caplog):
    (said,) = warnings(caplog, Words(), (RAGGED, Y))
    assert "padded with 0, which the model takes for values: let its forward take 'attention_mask'" in said


def test_padding_with_a_mask_is_not(caplog):
    assert warnings(caplog, Masked(), (RAGGED, Y)) == []
    assert warnings(caplog, Words(), ([[1, 2, 3]] * 24, Y)) == []


class Items(TorchDataset):
    def __init__(self, change, as_dict=False):
        self.change, self.as_dict = change, as_dict
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        x = self.change(X[i], self.generator)
        return {"x": x, "label": int(Y[i])} if self.as_dict else (x, int(Y[i]))


def flipped(x, generator):
    return x.flip(0) if torch.rand((), generator=generator) < 0.5 else x


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("change", [flipped, lambda x, g: (x + torch.rand(4, generator=g)).numpy()])
def test_samples_that_change_between_two_reads_are_mentioned(caplog, change, as_dict):
    lamina.data.as_dataset(Items(change, as_dict))
    (record,) = caplog.records
    assert "change from read to read (a random transform?), but each is read once" in record.getMessage()


@pytest.mark.parametrize("change", [lambda x, g: x, lambda x, g: x.numpy()])
def test_samples_that_stay_the_same_are_not(caplog, change):
    lamina.data.as_dataset(Items(change))
    assert caplog.records == []
