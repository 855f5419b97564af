"""Which engine is preferred: by the kind of layers, their sizes and the batch, never by a clock."""

import pytest
import torch
from torch import nn

from lamina.engines.preference import FEW_CLIENTS, LARGE, _on_a_gpu, why_apart
from lamina.objective.objective import Objective


def convolutions(width, norm=None):
    norms = [] if norm is None else [norm(width)]
    return nn.Sequential(nn.Conv2d(3, width, 3), *norms, nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU())


class Last(nn.Module):
    """A recurrent layer; its last output."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0][:, -1]


def on_a_cpu(module, shape, batch=16):
    return why_apart(Objective(module), cohort=10, batch=batch, sample=torch.randn(5, *shape))


@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (nn.Linear(60, 10), (60,), ""),
        (nn.Linear(1000, 300), (1000,), "300,300 parameters gains nothing from company"),
        (convolutions(8), (3, 12, 12), ""),
        (convolutions(32), (3, 32, 32), "million flops"),
        (convolutions(4, nn.BatchNorm2d), (3, 8, 8), ""),
        (convolutions(4, nn.BatchNorm2d), (3, 32, 32), "norms over many pixels"),
        (convolutions(4, lambda width: nn.GroupNorm(2, width)), (3, 32, 32), "norms over many pixels"),
        (convolutions(4), (3, 32, 32), ""),
        (Last(nn.LSTM(4, 32, batch_first=True)), (10, 4), ""),
        (Last(nn.LSTM(4, 33, batch_first=True)), (10, 4), "torch's LSTM is faster"),
        (Last(nn.GRU(4, 64, batch_first=True)), (10, 4), ""),
    ],
)
def test_on_a_cpu_small_operations_are_stacked(module, shape, reason):
    why = on_a_cpu(module, shape)
    assert reason in why
    assert bool(why) == bool(reason)


def test_the_batch_counts():
    module = convolutions(8)
    assert on_a_cpu(module, (3, 12, 12), batch=4) == ""
    assert "flops" in on_a_cpu(module, (3, 12, 12), batch=4096)


def test_a_frozen_layer_does_not_decide():
    module = nn.Sequential(nn.Linear(1000, 300).requires_grad_(False), nn.Linear(300, 3))
    assert on_a_cpu(module, (1000,), batch=1) == ""


def test_the_module_keeps_its_buffers():
    module = convolutions(4, nn.BatchNorm2d)
    on_a_cpu(module, (3, 8, 8))
    assert int(module[1].num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("layer", "size", "cohort", "reason"),
    [
        (nn.LSTM(4, 8), 1000, FEW_CLIENTS, "recurrent"),
        (nn.LSTM(4, 8), 1000, FEW_CLIENTS + 1, ""),
        (nn.BatchNorm2d(4), LARGE, 10, "BatchNorm"),
        (nn.BatchNorm2d(4), LARGE - 1, 10, ""),
        (nn.GroupNorm(2, 4), LARGE, 10, ""),
        (nn.BatchNorm1d(4), LARGE, 10, ""),
    ],
)
def test_on_a_gpu_few_clients_are_trained_apart(layer, size, cohort, reason):
    why = _on_a_gpu([layer], size, cohort)
    assert reason in why
    assert bool(why) == bool(reason)
