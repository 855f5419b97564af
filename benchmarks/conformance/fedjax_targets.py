"""FedJAX's server optimizers, and the steps of its clients, in float64."""

from unittest import mock

import fedjax
import jax
import numpy as np
import torch
from fedjax.algorithms import fed_avg, fed_prox, mime, mime_lite

import lamina

jax.config.update("jax_enable_x64", True)


def array(vector):
    """Return a torch vector for JAX."""
    return jax.numpy.asarray(np.asarray(vector))


def tensor(vector):
    """Return a vector of JAX for torch."""
    return torch.from_numpy(np.array(vector))


def server(name="adam", **options):
    """Return a server half: FedJAX applies a server optimizer to the clients' mean of `server - client`."""

    def step(x, delta, state, server_lr):
        optimizer = getattr(fedjax.optimizers, name)(server_lr, **options)
        if "fedjax" not in state:
            state["fedjax"] = optimizer.init(array(x))
        state["fedjax"], x = optimizer.apply(array(-delta), state["fedjax"], array(x))
        return tensor(x)

    return step


def client_functions(module, build):
    """Return what an algorithm of FedJAX builds for its clients: client_init, client_step and client_final."""
    built = []
    with mock.patch.object(module.for_each_client, "for_each_client", lambda *functions: built.append(functions)):
        build()
    return built[-1]


def step_of(state, k, module, build, shared):
    """Return the client's step; its state is created anew in every round."""
    init, step, _ = client_functions(module, build)
    if k == 1:
        state["fedjax"] = init(shared, jax.random.PRNGKey(0))
    return step


def linear_loss(params, batch, rng):
    """Return a loss whose gradient is the batch: lamina's gradient."""
    return jax.numpy.vdot(params, batch)[None]


def fedavg(y, grad, lr, state, k, x):
    """Take a local step of FedJAX's FedAvg."""
    optimizer = fedjax.optimizers.sgd(lr)

    def build():
        fed_avg.federated_averaging(lambda params, batch, rng: batch, optimizer, optimizer, None)

    state["fedjax"] = step_of(state, k, fed_avg, build, array(x))(state["fedjax"], array(grad))
    return tensor(state["fedjax"]["params"])


def fedprox(y, grad, lr, state, k, x, mu):
    """Take a local step of FedJAX's FedProx."""
    optimizer = fedjax.optimizers.sgd(lr)

    def build():
        fed_prox.fed_prox(linear_loss, optimizer, optimizer, None, proximal_weight=mu)

    step = step_of(state, k, fed_prox, build, array(x))
    state["fedjax"] = step(state["fedjax"], array(grad))
    return tensor(state["fedjax"]["params"])


def mime_adam(y, grad, lr, state, k, x, m, v_hat, mean_gradient, round, beta1, beta2, eps, rounds_before=0):
    """Take a local step of FedJAX's Mime with Adam, whose frozen moments are those of our server.

    `rounds_before` are added to its count of steps: after many, its bias correction is over.
    """
    optimizer = fedjax.optimizers.adam(lr, b1=beta1, b2=beta2, eps=eps)
    first, *rest = optimizer.init(array(x))
    frozen = (first._replace(count=jax.numpy.asarray(rounds_before + round - 1), mu=array(m), nu=array(v_hat)), *rest)
    shared = {"params": array(x), "opt_state": frozen, "control_variate": array(mean_gradient)}
    gradients = iter([0 * array(grad), array(grad)])  # at x, and at y: lamina feeds the difference

    def build():
        mime.create_train_for_each_client(lambda params, batch, rng: next(gradients), optimizer)

    state["fedjax"] = step_of(state, k, mime, build, shared)(state["fedjax"], None)
    return tensor(state["fedjax"]["params"])


def mimelite_adam(y, grad, lr, state, k, x, m, v_hat, round, beta1, beta2, eps, rounds_before=0):
    """Take a local step of FedJAX's Mime Lite with Adam, as `mime_adam` does."""
    optimizer = fedjax.optimizers.adam(lr, b1=beta1, b2=beta2, eps=eps)
    first, *rest = optimizer.init(array(x))
    frozen = (first._replace(count=jax.numpy.asarray(rounds_before + round - 1), mu=array(m), nu=array(v_hat)), *rest)

    def build():
        mime_lite.create_train_for_each_client(lambda params, batch, rng: batch, optimizer)

    step = step_of(state, k, mime_lite, build, {"params": array(x), "opt_state": frozen})
    state["fedjax"] = step(state["fedjax"], array(grad))
    return tensor(state["fedjax"]["params"])


@lamina.algorithm("fedjax_mimelite", title="Mime Lite with Adam as FedJAX steps", lr=0.1)
class FedjaxMimeLite(lamina.Mime):
    """Mime Lite that divides by the root of a second moment with the local gradient's square in it."""

    def step(self, local, down, grad, lr, layers):
        """Return the local state after a step; the server's momentum stays as it is."""
        m = self.beta1 * local.m + (1 - self.beta1) * grad
        v = self.beta2 * down.v_hat + (1 - self.beta2) * grad**2
        return local._replace(y=local.y - lr * m / (v.sqrt() + self.eps))
