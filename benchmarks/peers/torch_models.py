"""W1's and W2's models in plain torch: lamina's `cifar_cnn` and `mlp`, for environments without lamina."""

from __future__ import annotations

from torch import nn


class ChannelsFirst(nn.Module):
    """[n, height, width, channels] to [n, channels, height, width], as pfl's benchmark models begin."""

    def forward(self, x):
        return x.permute(0, 3, 1, 2)


def create(workload: str, *, channels_last: bool = False) -> nn.Module:
    if workload == "W2":
        return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    network = nn.Sequential(
        ChannelsFirst() if channels_last else nn.Identity(),
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(12544, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return network
