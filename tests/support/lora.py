"""An adapter of the user's own, as in docs/how-to/recipes.md: a frozen layer plus a product of two small matrices."""

import torch
from torch import nn


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, inputs):
        return self.base(inputs) + self.lora_B(self.lora_A(inputs))


def adapted(inputs, dtype=torch.float32):
    """Return a frozen network with an adapter on each of its two layers."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(Lora(nn.Linear(inputs, 8)), nn.ReLU(), Lora(nn.Linear(8, 3))).to(dtype)
