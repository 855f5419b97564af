"""What lamina does with a user's model and data in silence elsewhere is said in one warning."""

import pytest
import torch
from torch.utils.data import Dataset as TorchDataset

import lamina

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def warnings(caplog, model, data, **more):
    """Return what a simulation says before round 1, and in it."""
    settings = {"clients": 3, "batch_size": 4, "device": "cpu", "test": data}
    lamina.Simulation(model, data, "fedavg", **settings | more).run(1)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


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
def test_samples_that_change_between_two_reads_are_refused(change, as_dict):
    with pytest.raises(lamina.BadInput, match=r"change from read to read .* a function of \(batch, generator\)"):
        lamina.data.as_dataset(Items(change, as_dict))


class Late(TorchDataset):
    """1,000 samples, the last 50 of which are drawn anew at every read."""

    reads = 0

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        self.reads += 1
        return torch.full((2,), float(i)) if i < 950 else torch.randn(2), i % 2


def test_few_samples_that_change_are_found_wherever_they_are_by_few_reads():
    data = Late()
    with pytest.raises(lamina.BadInput, match="change from read to read"):
        lamina.data.as_dataset(data)
    assert data.reads <= 1000 + 64


@pytest.mark.parametrize("change", [lambda x, g: x, lambda x, g: x.numpy()])
def test_samples_that_stay_the_same_are_not(caplog, change):
    lamina.data.as_dataset(Items(change))
    assert caplog.records == []
