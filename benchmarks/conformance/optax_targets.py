"""Optimizers of optax as local and server halves, in float64."""

import jax
import numpy as np
import optax
import torch

import lamina

jax.config.update("jax_enable_x64", True)
SIZES = (("conv.weight", 72), ("conv.bias", 4), ("fc.weight", 40), ("fc.bias", 5))  # of the vectors that lamina feeds


def tree(vector):
    """Return a vector as one array for each layer."""
    names, sizes = zip(*SIZES, strict=True)
    parts = np.split(np.asarray(vector), np.cumsum(sizes)[:-1])
    return dict(zip(names, map(jax.numpy.asarray, parts), strict=True))


def vector(arrays):
    """Return one vector for arrays by layer."""
    return torch.from_numpy(np.concatenate([np.asarray(arrays[name]) for name, _ in SIZES]))


def apply(optimizer, state, x, gradient):
    """Return the model after a step; the optimizer's state stays in `state`."""
    x = tree(x)
    if "optax" not in state:
        state["optax"] = optimizer.init(x)
    updates, state["optax"] = optimizer.update(tree(gradient), state["optax"], x)
    return vector(optax.apply_updates(x, updates))


def server(name="adam", **options):
    """Return a server half that steps with an optimizer of optax on the negative mean displacement."""

    def step(x, delta, state, server_lr):
        return apply(getattr(optax, name)(server_lr, **options), state, x, -delta)

    return step


def local(name="adamw", restart=True, **options):
    """Return a local half that steps with an optimizer of optax, created anew in every round unless told."""

    def step(y, grad, lr, state, k):
        if restart and k == 1:
            state.clear()
        return apply(getattr(optax, name)(lr, **options), state, y, grad)

    return step


def lion(**options):
    """Return a local half: optax's Lion, whose momentum starts from the server's `m`."""

    def step(y, grad, lr, state, k, m):
        optimizer = optax.lion(lr, **options)
        if k == 1:
            first, *rest = optimizer.init(tree(y))
            state["optax"] = (first._replace(mu=tree(m)), *rest)
        return apply(optimizer, state, y, grad)

    return step


def lars(**options):
    """Return a local half: optax's LARS with the rate and trust coefficient that Fed-LARS' momentum implies."""

    def step(y, grad, lr, state, beta1):
        optimizer = optax.lars(lr * (1 - beta1), trust_coefficient=1.0, momentum=beta1, **options)
        return apply(optimizer, state, y, grad)

    return step


@lamina.algorithm("optax_yogi", title="FedYogi as optax steps", lr=0.1)
class OptaxYogi(lamina.FedYogi):
    """FedYogi whose momentum starts at -v_0, with copies of both moments corrected as Adam's are."""

    def init(self, x, layers):
        """Return the moments before round 1."""
        server = super().init(x, layers)
        return server._replace(m=-server.v)  # optax's is a mean of gradients, which are negative displacements

    def as_used(self, m, v, round):
        """Return the moments as the step uses them."""
        return m / (1 - self.beta1**round), v / (1 - self.beta2**round)


@lamina.algorithm("optax_amsgrad", title="AMSGrad as optax steps", lr=0.1)
class OptaxAmsgrad(lamina.FedAdam):
    """AMSGrad whose maximum is taken over corrected second moments."""

    def update(self, server, up, info):
        """Return the server's state after a round."""
        m = self.beta1 * server.m + (1 - self.beta1) * up.delta
        v = self.beta2 * server.v + (1 - self.beta2) * up.delta**2
        v_hat = torch.maximum(server.v_hat, v / (1 - self.beta2**info.round))
        x = server.x + self.server_lr * m / (1 - self.beta1**info.round) / (v_hat.sqrt() + self.tau)
        return server._replace(x=x, m=m, v=v, v_hat=v_hat)
