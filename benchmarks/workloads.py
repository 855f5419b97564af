"""The workloads that all contenders run, on synthetic data.

W1  pfl-research's CIFAR-10 benchmark: 1000 users x 50 images, 50 active, batch 10, 1 epoch, FedAvg 0.1, CNN, dropout
W2  MLP 784-200-10, 50 users x 1200, 25 active, batch 32, 1 epoch, FedAvg 0.1
W3  ResNet-18-GN, 100 users x 500, 10 active, batch 50, 5 epochs, FedLADA, random crop and flip
W4  21,840-parameter CNN, 50 users x 2400, 25 active, batch 128, Fed-LAMB, a population of 9 rates x 3 seeds
W5  W3 with ImageNet's 7x7 stem and gradient clipping; every user is active with probability 0.1 in each round

torch and lamina are imported inside functions: a peer's environment has no lamina, and FedJAX's has no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    import lamina

CLASSES = 10
PIXEL_MEAN, PIXEL_STD = 0.5, 0.2  # of pixels / 255, the same in every channel
RATES = (0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01)  # W4's: no member diverges
SEEDS = (0, 1, 2)  # W4's


@dataclass(frozen=True)
class Workload:
    """A model, its data, and one round."""

    model: tuple[str, dict[str, Any]]  # the name and options of `lamina.models.create`
    parameters: int
    shape: tuple[int, ...]
    users: int
    per_user: int
    active: int  # users in a round; the expected number if sampling is "bernoulli"
    batch: int
    epochs: int
    lr: float
    algorithm: str = "fedavg"
    augment: bool = False
    uint8: bool = True
    members: int = 1  # experiments that run side by side
    sampling: str = "exact"
    clip: float | None = None  # the largest norm of a gradient

    def samples(self, rounds: int) -> float:
        """Return the number of samples that one member processes per round, as the mean of the first rounds."""
        if self.sampling == "exact":
            users = float(self.active)
        else:
            users = sum(len(cohort(self, number)) for number in range(1, rounds + 1)) / rounds
        return users * self.per_user * self.epochs


WORKLOADS = {
    "W1": Workload(("cifar_cnn", {}), 1_626_442, (3, 32, 32), 1000, 50, 50, 10, 1, 0.1),
    "W2": Workload(("mlp", {}), 159_010, (784,), 50, 1200, 25, 32, 1, 0.1, uint8=False),
    "W3": Workload(("resnet18", {}), 11_173_962, (3, 32, 32), 100, 500, 10, 50, 5, 1e-3, "fedlada", augment=True),
    "W4": Workload(
        ("cnn", {}), 21_840, (1, 28, 28), 50, 2400, 25, 128, 1, 0.03, "fedlamb", members=len(RATES) * len(SEEDS)
    ),
    "W5": Workload(
        ("resnet18", {"stem": "imagenet"}), 11_181_642, (3, 32, 32), 100, 500, 10, 50, 5, 1e-3, "fedlada", augment=True,
        sampling="bernoulli", clip=10.0,
    ),
}  # fmt: skip


# --- data -------------------------------------------------------------------------------------------------------


def arrays(w: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels: a template for each class plus noise, so that there is something to learn."""
    g = np.random.default_rng(0)
    n = w.users * w.per_user
    y = g.integers(0, CLASSES, n)
    templates = g.standard_normal((CLASSES, *w.shape), dtype=np.float32)
    x = g.standard_normal((n, *w.shape), dtype=np.float32) + 0.5 * templates[y]
    return np.clip(128 + 48 * x, 0, 255).astype(np.uint8) if w.uint8 else x, y


def save(name: str, folder: Path) -> None:
    """Write a workload's arrays to files, once for all contenders."""
    for axis, array in zip("xy", arrays(WORKLOADS[name]), strict=True):
        np.save(folder / f"{name}_{axis}.npy", array)


def load(name: str, folder: Path, *, mapped: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Read the arrays that `save` wrote; with `mapped`, only the parts that are used are read."""
    mode = "r" if mapped else None
    return np.load(folder / f"{name}_x.npy", mmap_mode=mode), np.load(folder / f"{name}_y.npy", mmap_mode=mode)


def normalised(x: np.ndarray) -> np.ndarray:
    """Return stored samples as model inputs, for contenders that normalise all of them beforehand."""
    if x.dtype != np.uint8:
        return x
    return (x / np.float32(255) - np.float32(PIXEL_MEAN)) / np.float32(PIXEL_STD)


def owned(w: Workload, user: int) -> slice:
    """Return the range of a user's samples."""
    return slice(user * w.per_user, (user + 1) * w.per_user)


# --- lamina -----------------------------------------------------------------------------------------------------


def data(w: Workload, x: np.ndarray | None = None, y: np.ndarray | None = None) -> lamina.Dataset:
    """Return the training data; without arrays, new ones are made."""
    import torch

    from lamina.data import Dataset

    if x is None or y is None:
        x, y = arrays(w)
    if not w.uint8:
        return Dataset(torch.from_numpy(x), torch.from_numpy(y))
    channels = w.shape[0]
    mean, std = (PIXEL_MEAN,) * channels, (PIXEL_STD,) * channels
    return Dataset(torch.from_numpy(x), torch.from_numpy(y), mean=mean, std=std)


def cohort(w: Workload, number: int) -> np.ndarray:
    """Return the users that lamina's round plan selects in a round, counted from 1."""
    from lamina.rounds.clients import Clients
    from lamina.rounds.plan import Plan
    from lamina.rounds.settings import TrainSettings

    protocol = TrainSettings(lr=w.lr, participation=w.active / w.users, sampling=w.sampling)
    return Plan(Clients.elsewhere(w.users), protocol).cohort(number)


def parts(w: Workload) -> list[np.ndarray]:
    """Return the indices of every user's samples."""
    samples = np.arange(w.users * w.per_user)
    return [samples[owned(w, user)] for user in range(w.users)]


def model(w: Workload) -> torch.nn.Module:
    """Return the model with its initial weights."""
    from lamina import models

    return models.create(w.model[0], w.shape, CLASSES, seed=0, **w.model[1])


def simulation(
    name: str, train: lamina.Dataset, algorithm: lamina.Algorithm | None = None, **more: Any
) -> lamina.Simulation:
    """Return a workload as a simulation that does not evaluate; `more` overrides its settings."""
    import lamina
    from lamina.data import Augment

    w = WORKLOADS[name]
    settings = {
        "clients": parts(w), "participation": w.active / w.users, "batch_size": w.batch, "epochs": w.epochs, "lr": w.lr,
        "augmentation": Augment() if w.augment else None, "sampling": w.sampling, "clip": w.clip,
        "evaluate_every": 10**8,
    }  # fmt: skip
    return lamina.Simulation(model(w), train, algorithm or w.algorithm, **settings | more)


def population(name: str, train: lamina.Dataset, **more: Any) -> lamina.Population:
    """Return W4's population: a member for every rate and seed."""
    import lamina

    return lamina.Population([simulation(name, train, lr=lr, seed=seed, **more) for lr in RATES for seed in SEEDS])
