"""Small algorithms with a second gradient, which the tests of several engines share."""

import dataclasses
from typing import NamedTuple

import torch

import lamina
from lamina import FedAvg, Needs


@dataclasses.dataclass(frozen=True, eq=False)
class FedSam(FedAvg):
    """Sharpness-aware minimisation (Qu et al. 2022): step with the gradient at y + rho * g / ||g||."""

    rho: lamina.Number = 0.5

    def needs(self, round):
        return Needs(second_gradient=True)

    def second_point(self, local, down, grad, lr, layers):
        norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=True)
        return local.y + self.rho * grad / norm.clamp(min=1e-12)

    def step(self, local, down, grad, lr, layers, second_grad):
        return super().step(local, down, second_grad, lr, layers)


@dataclasses.dataclass(frozen=True, eq=False)
class VarianceReduced(FedAvg):
    """Step along g(y) - g(x) and towards zero: both points of a batch, layer by layer."""

    pull: lamina.Number = 0.1

    def needs(self, round):
        return Needs(second_gradient=True)

    def second_point(self, local, down, grad, lr, layers):
        return down.x

    def step(self, local, down, grad, lr, layers, second_grad):
        return super().step(local, down, grad - second_grad + self.pull * down.x, lr, layers)


@dataclasses.dataclass(frozen=True, eq=False)
class ControlVariate(VarianceReduced):
    """The same steps, with the difference of the gradients by the engine."""

    def needs(self, round):
        return Needs(control_variate=True)

    def step(self, local, down, grad, lr, layers, second_grad=None):
        return FedAvg.step(self, local, down, grad + self.pull * down.x, lr, layers)


@dataclasses.dataclass(frozen=True, eq=False)
class ControlledSam(FedSam):
    """Both gradients relative to those at x."""

    def needs(self, round):
        return Needs(control_variate=True, second_gradient=True)

    def step(self, local, down, grad, lr, layers, second_grad):
        return FedAvg.step(self, local, down, grad + second_grad + 0.1 * down.x, lr, layers)


@dataclasses.dataclass(frozen=True, eq=False)
class SamInEvenRounds(FedSam):
    """FedAvg in odd rounds."""

    def needs(self, round):
        return Needs(second_gradient=round % 2 == 0)

    def step(self, local, down, grad, lr, layers, second_grad=None):
        return FedAvg.step(self, local, down, grad if second_grad is None else second_grad, lr, layers)


class Own(NamedTuple):
    v: torch.Tensor


class Both(NamedTuple):
    y: torch.Tensor
    v: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Ditto(FedAvg):
    """A client trains a model of its own beside the shared one (Li et al. 2021), and uses that one."""

    pull: lamina.Number = 0.1

    def client_init(self, x, layers):
        return Own(x)

    def begin(self, down, client, info):
        return Both(down.x, client.v)

    def needs(self, round):
        return Needs(second_gradient=True)

    def second_point(self, local, down, grad, lr, layers):
        return local.v

    def step(self, local, down, grad, lr, layers, second_grad):
        return Both(local.y - lr * grad, local.v - lr * (second_grad + self.pull * (local.v - down.x)))

    def finish(self, local, down, client, info):
        up, _ = super().finish(local, down, client, info)
        return up, Own(local.v)

    def client_model(self, x, client):
        return client.v
