"""The workloads every contender runs, on synthetic data of the right shape.

W1  pfl-research's CIFAR-10 benchmark: 1000 users x 50 images, 50 active, batch 10, 1 epoch, FedAvg 0.1, CNN, dropout
W2  MLP 784-200-10, 50 clients x 1200, 25 active, batch 32, 1 epoch, FedAvg 0.1
W3  ResNet-18-GN, 100 clients x 500, 10 active, batch 50, 5 epochs, FedLADA, random crop and flip
W4  21,840-parameter CNN, 25 active x batch 128, K = 19, Fed-LAMB, a population of 9 rates x 3 seeds
W5  FedLADA's simulator: as W3 with ImageNet's stem, clipping, and every client active with probability 0.1

torch and lamina are imported where they are needed: a peer's environment has no lamina, FedJAX's has no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    import lamina

CLASSES = 10
PIXEL_MEAN, PIXEL_STD = 0.5, 0.2  # of pixels / 255, the same in every channel
RATES = (0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01)  # of W4's members: none diverges
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Workload:
    model: tuple[str, dict[str, Any]]
    parameters: int
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
    members: int = 1  # experiments that run side by side
    settings: dict[str, Any] = field(default_factory=dict)  # other arguments of lamina.Simulation

    @property
    def samples(self) -> int:
        """Samples that one member processes in a round."""
        return self.active * self.per_user * self.epochs


WORKLOADS = {
    "W1": Workload(("cifar_cnn", {}), 1_626_442, (3, 32, 32), 1000, 50, 50, 10, 1, 0.1),
    "W2": Workload(("mlp", {}), 159_010, (784,), 50, 1200, 25, 32, 1, 0.1, uint8=False),
    "W3": Workload(("resnet18", {}), 11_173_962, (3, 32, 32), 100, 500, 10, 50, 5, 1e-3, "fedlada", augment=True),
    "W4": Workload(
        ("cnn", {}), 21_840, (1, 28, 28), 50, 2400, 25, 128, 1, 0.03, "fedlamb", members=len(RATES) * len(SEEDS)
    ),
    "W5": Workload(
        ("resnet18", {"stem": "imagenet"}), 11_181_642, (3, 32, 32), 100, 500, 10, 50, 5, 1e-3, "fedlada", augment=True,
        settings={"sampling": "bernoulli", "clip": 10.0},
    ),
}  # fmt: skip


# --- data -------------------------------------------------------------------------------------------------------


def arrays(w: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Class templates plus noise: something to learn, in the right shape and type."""
    g = np.random.default_rng(0)
    n = w.users * w.per_user
    y = g.integers(0, CLASSES, n)
    templates = g.standard_normal((CLASSES, *w.shape), dtype=np.float32)
    x = g.standard_normal((n, *w.shape), dtype=np.float32) + 0.5 * templates[y]
    return np.clip(128 + 48 * x, 0, 255).astype(np.uint8) if w.uint8 else x, y


def save(name: str, folder: Path) -> None:
    """Write the arrays once for all contenders, so that none spends its time on making them."""
    for axis, array in zip("xy", arrays(WORKLOADS[name]), strict=True):
        np.save(folder / f"{name}_{axis}.npy", array)


def load(name: str, folder: Path, *, mapped: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """What `save` wrote; mapped: only the parts that are looked at are read."""
    mode = "r" if mapped else None
    return np.load(folder / f"{name}_x.npy", mmap_mode=mode), np.load(folder / f"{name}_y.npy", mmap_mode=mode)


def normalised(x: np.ndarray) -> np.ndarray:
    """Model input of stored samples, for contenders that normalise once and beforehand."""
    if x.dtype != np.uint8:
        return x
    return (x / np.float32(255) - np.float32(PIXEL_MEAN)) / np.float32(PIXEL_STD)


def owned(w: Workload, user: int) -> slice:
    """Where a user's samples are."""
    return slice(user * w.per_user, (user + 1) * w.per_user)


# --- lamina -----------------------------------------------------------------------------------------------------


def data(w: Workload, x: np.ndarray | None = None, y: np.ndarray | None = None) -> lamina.Dataset:
    import torch

    from lamina.data import Dataset

    if x is None or y is None:
        x, y = arrays(w)
    if not w.uint8:
        return Dataset(torch.from_numpy(x), torch.from_numpy(y))
    channels = w.shape[0]
    mean, std = (PIXEL_MEAN,) * channels, (PIXEL_STD,) * channels
    return Dataset(torch.from_numpy(x), torch.from_numpy(y), mean=mean, std=std)


def parts(w: Workload) -> list[np.ndarray]:
    return [np.arange(w.users * w.per_user)[owned(w, user)] for user in range(w.users)]


def model(w: Workload) -> torch.nn.Module:
    from lamina import models

    return models.create(w.model[0], w.shape, CLASSES, seed=0, **w.model[1])


def simulation(name: str, train: lamina.Dataset, **more: Any) -> lamina.Simulation:
    import lamina
    from lamina.data import Augment

    w = WORKLOADS[name]
    settings = {
        "clients": parts(w), "participation": w.active / w.users, "batch_size": w.batch, "epochs": w.epochs, "lr": w.lr,
        "augmentation": Augment() if w.augment else None, "evaluate_every": 10**8,
    }  # fmt: skip
    return lamina.Simulation(model(w), train, w.algorithm, **settings | w.settings | more)


def population(name: str, train: lamina.Dataset, **more: Any) -> lamina.Population:
    """W4's members: every rate with every seed."""
    import lamina

    return lamina.Population([simulation(name, train, lr=lr, seed=seed, **more) for lr in RATES for seed in SEEDS])
