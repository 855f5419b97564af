"""What Flower leaves to the client, and Krum, which lamina lacks, from its paper."""

import torch
from flwr.serverapp.strategy import Krum


def fedprox_docs(model, batches, lr, loss, mu):
    """Train a client as the docstring of `flwr.serverapp.strategy.FedProx` says."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    global_params = [parameter.detach().clone() for parameter in model.parameters()]
    for inputs, labels in batches:
        optimizer.zero_grad()
        # the docstring's lines, with its `criterion` and `net` called `loss` and `model`
        proximal_term = 0.0
        for local_weights, global_weights in zip(model.parameters(), global_params, strict=True):
            proximal_term += (local_weights - global_weights).norm(2)
        (loss(model(inputs), labels) + (mu / 2) * proximal_term).backward()
        optimizer.step()


def fedprox_squared(model, batches, lr, loss, mu):
    """Train a client with the docstring's lines, but the squared norm."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    global_params = [parameter.detach().clone() for parameter in model.parameters()]
    for inputs, labels in batches:
        optimizer.zero_grad()
        pairs = zip(model.parameters(), global_params, strict=True)
        proximal_term = sum((ours - theirs).square().sum() for ours, theirs in pairs)
        (loss(model(inputs), labels) + (mu / 2) * proximal_term).backward()
        optimizer.step()


class PaperKrum:
    """Krum of Blanchard et al. 2017, as an aggregation of ours: the row closest to its n - f - 2 nearest others."""

    def __init__(self, hostile=1):
        self.hostile = hostile

    def combine(self, rows, weights):
        """Return one of the rows."""
        scores = []
        for i, row in enumerate(rows):
            others = torch.cat([rows[:i], rows[i + 1 :]])
            distances = (others - row).square().sum(1).sort().values
            scores.append(distances[: len(rows) - self.hostile - 2].sum())
        return rows[int(torch.stack(scores).argmin())]


def krum(num_malicious_nodes=1):
    """Return Flower's Krum."""
    return Krum(num_malicious_nodes=num_malicious_nodes)
