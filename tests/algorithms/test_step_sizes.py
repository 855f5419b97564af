"""Local step sizes without tuning (Δ-SGD, FedSPS): what their formulas imply, and the loss in `step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lamina
import transcriptions as T  # noqa: N812
from given_rounds import ALONE
from lamina import BadInput
from paper_problem import INPUTS, LABELS, LAYERS, START, close, differ, infos, make, simulate, trajectory, vectors

CURVATURES = torch.linspace(0.2, 3.0, T.SIZE, dtype=torch.float64)
Function = Callable[[Tensor], tuple[Tensor, Tensor]]


def bowl(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return F = sum_j a_j y_j^2 / 2, and its gradient."""
    return (CURVATURES * y**2).sum() / 2, CURVATURES * y


def path(name: str, given: dict[str, Any], function: Function, steps: int = 6, lr: float = 0.2) -> Any:
    """Return a client's local models [K + 1, p] with the loss and the gradient of a function, and its last state."""
    algorithm, (server_info, client_info) = make(name, given), infos(1, lr)
    down = algorithm.broadcast(algorithm.init(vectors(seed=3), LAYERS), server_info)
    local = algorithm.begin(down, algorithm.client_init(down.x, LAYERS), client_info)
    found = [local.y]
    for _ in range(steps):
        loss, grad = function(local.y)
        more = {"loss": loss.reshape(1)} if algorithm.needs(1).loss else {}
        if algorithm.needs(1).second_gradient:
            more["second_grad"] = function(algorithm.second_point(local, down, grad, lr, LAYERS))[1]
        local = algorithm.step(local, down, grad, lr, LAYERS, **more)
        found.append(local.y)
    return torch.stack(found), local


def rates(found: Tensor, function: Function) -> Tensor:
    """Return the sizes of the steps of a path."""
    grads = torch.stack([function(y)[1] for y in found[:-1]])
    return (found[:-1] - found[1:]).norm(dim=1) / grads.norm(dim=1)


# --- FedSPS -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"weighting": "examples"}, {"engine": "stacked"}], ids=str)
def test_fedsps_with_bold_steps_is_fedavg(settings: Any) -> None:
    """c -> 0: every step is the cap, the learning rate."""
    shared, plain = {"server_lr": 0.8, "decay": 0.2}, {"lr": 0.1, **settings}
    fedavg = trajectory("fedavg", shared, **plain)
    close(trajectory("fedsps", {**shared, "c": 1e-30}, **plain), fedavg)
    assert differ(trajectory("fedsps", {**shared, "c": 30.0}, **plain), fedavg)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_fedsps_steps_by_the_loss_of_the_batch(eps: float, decay: float) -> None:
    """gamma = (F - l* + lambda/2 ||y||^2) / (c ||g + lambda y||^2 + eps): one client, the loss of its own batches."""
    given = {"c": 8.0, "lower_bound": 0.1, "eps": eps, "decay": decay}
    simulation, gradient, y = simulate(make("fedsps", given), **ALONE), T.Gradient(INPUTS, LABELS), START
    simulation.run(1)
    plan = simulation.plan.round(1)
    for k in range(plan.steps[0]):
        batch = plan.batch(0, k)
        w1, b1, w2, b2 = (y[part].reshape(s) for part, s in zip(T.TENSORS, T.SHAPES.values(), strict=True))
        logits = np.tanh(INPUTS[batch] @ w1.T + b1) @ w2.T + b2
        loss = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(batch)), LABELS[batch]])
        g = gradient(y, batch) + decay * y
        gamma = (loss + decay / 2 * y @ y - 0.1) / (8.0 * g @ g + eps)
        assert gamma < plan.lr
        y = y - gamma * g
    close(simulation.state.server.x, y)


def test_fedsps_finds_the_centre_of_a_round_bowl_in_one_step() -> None:
    """F = a ||y - z||^2 / 2 + 5, l* = 5: gamma = 1 / (2 c a), so c = 1/2 lands on z; and there is no step at z."""
    z = vectors(seed=8)

    def function(y: Tensor) -> tuple[Tensor, Tensor]:
        return 0.7 * ((y - z) ** 2).sum() / 2 + 5, 0.7 * (y - z)

    found, _ = path("fedsps", {"lower_bound": 5.0}, function, lr=1e3)
    for y in found[1:]:
        close(y, z)


def test_fedsps_steps_are_bounded_and_do_not_depend_on_the_unit_of_the_loss() -> None:
    """min(1 / (2 c L), gamma_b) <= gamma <= gamma_b; F times s with gamma_b over s is the same path."""
    found, _ = path("fedsps", {"c": 0.5}, bowl, lr=0.4)
    sizes = rates(found, bowl)
    assert float(sizes.max()) <= 0.4 * (1 + 1e-12)
    assert float(sizes.min()) >= 1 / 3.0 * (1 - 1e-12)
    assert float(sizes.min()) < 0.4
    scaled, _ = path("fedsps", {"c": 0.5}, lambda y: (8 * bowl(y)[0], 8 * bowl(y)[1]), lr=0.05)
    close(scaled, found)


def test_fedsps_never_moves_away_from_the_minimum() -> None:
    """||y+ - x*|| <= ||y - x*|| for convex F with minimum l* at x* and c >= 1/2, however large the cap."""
    found, _ = path("fedsps", {"c": 0.5}, bowl, steps=50, lr=1e6)
    distances = found.norm(dim=1)
    assert (distances[1:] <= distances[:-1]).all()
    assert float(distances[-1]) < 0.1 * float(distances[0])


@pytest.mark.parametrize("loss", [0.0, 1.0, -1.0])
def test_fedsps_without_a_gradient_stays(loss: float) -> None:
    """No step, and no NaN."""
    found, _ = path("fedsps", {}, lambda y: (torch.tensor(loss, dtype=torch.float64), torch.zeros_like(y)))
    assert (found == found[0]).all()


def test_fedsps_below_its_lower_bound_stays() -> None:
    """No step back where F < l*."""
    found, _ = path("fedsps", {"lower_bound": 1e3}, bowl, lr=1e-3)
    assert float(bowl(found[0])[0]) < 1e3
    assert (found == found[0]).all()
    assert differ(path("fedsps", {"lower_bound": 1e-3}, bowl, lr=1e-3)[0][-1], found[0])


# --- Δ-SGD --------------------------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("gradients", ["same_batch", "consecutive"])


@KINDS
def test_deltasgd_whose_steps_neither_grow_nor_shrink_is_fedavg(gradients: str) -> None:
    """delta = 0, gamma -> infinity; the rate falls from round to round, as the run says."""
    shared = {"server_lr": 0.8, "decay": 0.2}
    given = {**shared, "gradients": gradients, "delta": 0.0}
    fedavg = trajectory("fedavg", shared, lr=0.1)
    close(trajectory("deltasgd", {**given, "gamma": 1e30}, lr=0.1), fedavg)
    assert differ(trajectory("deltasgd", {**given, "gamma": 0.1}, lr=0.1), fedavg)


@KINDS
def test_deltasgds_first_step_is_fedavg(gradients: str) -> None:
    """K_i = 1 for all."""
    plain = {"lr": 0.1, "local_steps": 1}
    close(trajectory("deltasgd", {"gradients": gradients, "gamma": 0.01}, **plain), trajectory("fedavg", **plain))


def test_deltasgds_step_sizes_grow_by_a_limit() -> None:
    """gamma -> infinity: theta_k = sqrt(1 + delta theta_{k-1}) tends to (delta + sqrt(delta^2 + 4)) / 2."""
    found, local = path("deltasgd", {"gamma": 1e30, "delta": 0.5}, bowl, steps=40, lr=1e-9)
    theta, rate = 1.0, 1e-9
    for size in rates(found, bowl):
        assert float(size) == pytest.approx(rate, rel=1e-5)
        theta = (1 + 0.5 * theta) ** 0.5
        rate *= theta
    assert float(local.growth) == pytest.approx((0.5 + 4.25**0.5) / 2, rel=1e-9)


def test_deltasgd_measures_the_curvature() -> None:
    """F = a ||y - z||^2 / 2: gamma / (2 a) from the second step on; with gamma = 2 that step lands on z."""
    z = vectors(seed=8)

    def function(y: Tensor) -> tuple[Tensor, Tensor]:
        return 0.7 * ((y - z) ** 2).sum() / 2, 0.7 * (y - z)

    found, _ = path("deltasgd", {"delta": 1e6}, function, steps=2)
    close(found[1] - z, (1 - 0.2 * 0.7) * (found[0] - z))
    close(found[2], z)
    _, local = path("deltasgd", {"delta": 1e6, "gamma": 1.0, "eps": 0.25}, function, steps=2)
    close(local.rate, [0.5 / 0.7 + 0.25])


def test_deltasgds_step_sizes_have_a_lower_bound() -> None:
    """F is L-smooth: eta_k >= min(gamma / (2 L), eta_0)."""
    for gamma in (0.1, 2.0):
        sizes = rates(path("deltasgd", {"gamma": gamma}, bowl, steps=30)[0], bowl)
        assert float(sizes.min()) >= min(gamma / (2 * 3.0), 0.2) * (1 - 1e-9)


def test_deltasgd_forgets_the_unit_of_the_loss() -> None:
    """F times s with eta_0 over s: the same path."""
    found, _ = path("deltasgd", {"gamma": 0.5}, bowl, lr=0.2)
    scaled, _ = path("deltasgd", {"gamma": 0.5}, lambda y: (8 * bowl(y)[0], 8 * bowl(y)[1]), lr=0.025)
    close(scaled, found)


def test_deltasgd_on_full_batches_may_keep_the_previous_gradient() -> None:
    """Where all batches are the same, so are both readings; on mini-batches they are not (C48)."""
    full = {"batch_size": 20, "local_steps": 4}
    paths = [trajectory("deltasgd", {"gradients": g, "decay": 0.1}, **full) for g in ("same_batch", "consecutive")]
    close(*paths)
    one, other = (trajectory("deltasgd", {"gradients": g, "gamma": 0.5}) for g in ("same_batch", "consecutive"))
    assert differ(one, other)


@KINDS
def test_deltasgd_without_a_gradient_stays(gradients: str) -> None:
    """Both differences are 0: the step size grows, and there is no NaN."""
    found, local = path("deltasgd", {"gradients": gradients}, lambda y: (y.sum(), torch.zeros_like(y)), steps=2)
    assert (found == found[0]).all()
    close(local.rate, [0.2 * 1.1**0.5])


# --- engines, and what is refused ---------------------------------------------------------------------------------


def test_a_step_that_does_not_take_the_loss_is_refused() -> None:
    class Forgetful(lamina.FedAvg):
        def needs(self, round: int) -> lamina.Needs:
            return lamina.Needs(loss=True)

    with pytest.raises(BadInput, match=r"step fails in a trial round: TypeError: .* keyword argument 'loss'"):
        simulate(Forgetful())
