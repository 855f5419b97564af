"""A linear model on thirty samples of three classes, for tests of arguments."""

import torch
from torch import nn

import lamina

X, Y = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3


def simulate(algorithm="fedlamb", **more):
    torch.manual_seed(0)
    return lamina.Simulation(nn.Linear(4, 3), (X, Y), algorithm, device="cpu", **{"clients": 3} | more)


def weights(simulation, rounds=2):
    simulation.run(rounds)
    return simulation.state.server.x
