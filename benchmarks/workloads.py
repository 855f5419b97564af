"""The workloads every contender runs, on synthetic data of the right shape.

W1  pfl-research's CIFAR-10 benchmark: 1000 users x 50 images, 50 active, batch 10, 1 epoch, FedAvg 0.1, CNN, dropout
W2  MLP 784-200-10, 50 clients x 1200, 25 active, batch 32, 1 epoch, FedAvg 0.1
W3  ResNet-18-GN, 100 clients x 500, 10 active, batch 50, 5 epochs, FedLADA, random crop and flip
W4  21,840-parameter CNN, 25 active x batch 128, K = 19, Fed-LAMB, a population of 9 rates x 3 seeds
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import lamina
from lamina import models
from lamina.data import Augment, Dataset


@dataclass(frozen=True)
class Workload:
    model: tuple[str, dict[str, Any]]
    shape: tuple[int, ...]
    users: int
    per_user: int
    active: int
    batch: int
    epochs: int
    lr: float
    algorithm: str = "fedavg"
    augment: bool = False
    uint8: bool = True


WORKLOADS = {
    "W1": Workload(("cifar_cnn", {}), (3, 32, 32), 1000, 50, 50, 10, 1, 0.1),
    "W2": Workload(("mlp", {}), (784,), 50, 1200, 25, 32, 1, 0.1, uint8=False),
    "W3": Workload(("resnet18", {}), (3, 32, 32), 100, 500, 10, 50, 5, 1e-3, "fedlada", augment=True),
    "W4": Workload(("cnn", {}), (1, 28, 28), 50, 2400, 25, 128, 1, 0.03, "fedlamb"),
}
RATES = (0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5)


def data(w: Workload) -> Dataset:
    """Class templates plus noise: something to learn, in the right shape and type."""
    g = np.random.default_rng(0)
    n = w.users * w.per_user
    y = g.integers(0, 10, n)
    templates = g.standard_normal((10, *w.shape), dtype=np.float32)
    x = g.standard_normal((n, *w.shape), dtype=np.float32) + 0.5 * templates[y]
    if not w.uint8:
        return Dataset(torch.from_numpy(x), torch.from_numpy(y))
    pixels = np.clip(128 + 48 * x, 0, 255).astype(np.uint8)
    channels = w.shape[0]
    return Dataset(torch.from_numpy(pixels), torch.from_numpy(y), mean=(0.5,) * channels, std=(0.2,) * channels)


def parts(w: Workload) -> list[np.ndarray]:
    return [np.arange(i * w.per_user, (i + 1) * w.per_user) for i in range(w.users)]


def model(w: Workload) -> torch.nn.Module:
    return models.create(w.model[0], w.shape, 10, seed=0, **w.model[1])


def simulation(name: str, train: Dataset, **more: Any) -> lamina.Simulation:
    w = WORKLOADS[name]
    settings = {
        "clients": parts(w), "participation": w.active / w.users, "batch_size": w.batch, "epochs": w.epochs, "lr": w.lr,
        "augmentation": Augment() if w.augment else None, "evaluate_every": 10**9,
    }  # fmt: skip
    return lamina.Simulation(model(w), train, w.algorithm, **settings | more)
