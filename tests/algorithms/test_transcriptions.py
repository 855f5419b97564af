"""What the cards of the self-tuning, matrix and averaging methods imply, on the transcriptions themselves.

The library is compared with the transcriptions, so a slip in one of them would look like a slip in the library. No
algorithm of the library runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Options
from typing import Any

import numpy as np
import pytest

import more_transcriptions as M  # noqa: N812
import quadratics
import transcriptions as T  # noqa: N812
from paper_problem import CLIENTS, INPUTS, LABELS, START, close, differ

GRADIENT = T.Gradient(INPUTS, LABELS)
CURVATURES, CENTRES, OPTIMUM = (
    values.numpy() for values in (quadratics.CURVATURES, quadratics.CENTRES, quadratics.OPTIMUM)
)
SGD = {"by_examples": False, "decay": 0.0, "server_lr": 1.0}
EXP = SGD | {"eps": 0.0, "eps_decay": 1.0}
NOVA = SGD | {"momentum": 0.0, "mu": 0.0}
DELTA = SGD | {"theta_init": 1.0, "delta": 0.1, "gamma": 2.0, "eps": 0.0, "gradients": "same_batch"}
SPS = SGD | {"c": 0.5, "eps": 0.0, "lower_bound": 0.0}
SCAFFNEW = SGD | {"p": 0.0}
MUON = SGD | {
    "beta": 0.9,
    "nesterov": True,
    "muon_scale": 0.5,
    "muon_on": "matrices",
    "conv_scale": "one",
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-10,
}


def plan(steps: list[int], rounds: int, lr: Any = 0.1, cohorts: Any = None) -> list[Any]:
    """Return rounds in which client i takes `steps[i]` steps on batches that hold its samples, then its number."""
    out = []
    for r in range(rounds):
        cohort = list(range(len(steps))) if cohorts is None else list(cohorts[r])
        samples = [CLIENTS[i] if steps is FULL else np.array([i]) for i in cohort]
        rnd = Options(cohort=cohort, samples=samples, steps=np.array([steps[i] for i in cohort], dtype=float))
        rnd.lr = lr(r) if callable(lr) else lr
        rnd.participation = len(cohort) / len(steps)
        rnd.batch = lambda c, k, samples=samples: samples[c]
        out.append(rnd)
    return out


FULL = [3, 3, 3, 3, 3]  # the five clients of the paper problem, on their full data


def quadratic(y: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Return the gradient of sum_j a_ij (y_j - c_ij)^2 / 2, for the client whose number is in the batch."""
    return CURVATURES[batch[0]] * (y - CENTRES[batch[0]])


def path(
    name: str, o: dict[str, Any], rounds: list[Any], gradient: Callable[..., Any] = GRADIENT, start: Any = START
) -> np.ndarray:
    """Return x after every round."""
    follow = getattr(M, name, None) or getattr(T, name)
    return np.array([record.server["x"] for record in follow(np.array(start), rounds, gradient, Options(**o))])


# --- FedNova, FedExP ----------------------------------------------------------------------------------------------


def test_fednova_with_equal_steps_is_fedavg() -> None:
    """a_i = tau: also with momentum, where FedAvg's clients have it, too."""
    rounds = plan(FULL, 3)
    close(path("fednova", NOVA | {"server_lr": 0.7}, rounds), path("fedavg", SGD | {"server_lr": 0.7}, rounds))
    x, ends = START.copy(), []
    for i in rounds[0].cohort:
        y, b = x.copy(), 0.0
        for _ in range(3):
            b = 0.6 * b + GRADIENT(y, CLIENTS[i])
            y = y - 0.1 * b
        ends.append(y)
    close(path("fednova", NOVA | {"momentum": 0.6}, rounds)[0], np.mean(ends, axis=0))


@pytest.mark.parametrize("option", ["momentum", "mu"])
def test_fednovas_weights_are_the_closed_forms(option: str) -> None:
    """A constant gradient g: y_K - x = -eta a_i g, so all clients' directions are -eta g, whatever their K_i."""
    steps, lr, rho, mu = np.array([1, 2, 7]), 0.1, 0.6, 0.5
    weights = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    ends = path("fednova", NOVA | {option: {"momentum": rho, "mu": mu}[option]}, plan(list(steps), 1, lr),
                lambda y, batch: np.ones(2), np.zeros(2))  # fmt: skip
    close(ends[0], np.full(2, -lr * (weights if option == "momentum" else steps).mean()))


def test_fednova_finds_the_optimum_of_all_clients() -> None:
    """Unequal K_i, small rate: Sum_i grad F_i = 0; FedAvg weights the clients by K_i."""
    steps = [2, 3, 10, 5]
    rounds = plan(steps, 400, 0.01)
    close(path("fednova", NOVA, rounds, quadratic, [0.0, 0.0])[-1], OPTIMUM, rtol=0.15)
    K = np.array(steps)[:, None]
    biased = (K * CURVATURES * CENTRES).sum(0) / (K * CURVATURES).sum(0)
    close(path("fedavg", SGD, rounds, quadratic, [0.0, 0.0])[-1], biased, rtol=0.15)
    assert differ(biased, OPTIMUM, 0.3)


def test_fedexps_rate() -> None:
    """One client: 1. Four orthonormal displacements: mean n_i = 1, ||D||^2 = 1/4, so the rate is 1 / (2 / 4) = 2."""
    close(path("fedexp", EXP, plan([2], 3), quadratic, [0.0, 0.0]),
          path("fedavg", SGD, plan([2], 3), quadratic, [0.0, 0.0]))  # fmt: skip
    rounds, start = plan([1] * 4, 1, 1.0), np.zeros(4)
    x = path("fedexp", EXP, rounds, lambda y, batch: -np.eye(4)[batch[0]], start)
    close(x[0], 2 * np.full(4, 0.25))
    close(path("fedexp", EXP | {"eps": 0.25}, rounds, lambda y, batch: -np.eye(4)[batch[0]], start), x / 2)


# --- Muon ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(20, 7), (7, 20), (3, 8, 30)])
def test_newton_schulz_orthogonalises(shape: tuple[int, ...]) -> None:
    """Singular values within [.68, 1.21]; free of scale; it commutes with transposition and permutations."""
    U = np.random.default_rng(0).standard_normal(shape)
    O = M.newton_schulz(U)  # noqa: E741
    values = np.linalg.svd(O, compute_uv=False)
    assert values.min() > 0.68
    assert values.max() < 1.21
    close(M.newton_schulz(1e3 * U), O, rtol=1e-6)  # but for 1e-7 beside the norm
    close(M.newton_schulz(np.swapaxes(U, -1, -2)), np.swapaxes(O, -1, -2))
    order = np.random.default_rng(1).permutation(shape[-1])
    close(M.newton_schulz(U[..., order]), O[..., order])


def test_muon_scales_tall_matrices_only() -> None:
    """sqrt(rows / cols) if that is above 1; the authors take a kernel's height and width, here 3 and 3 (C9)."""
    U = np.random.default_rng(0).standard_normal((40, 2, 3, 3))
    close(M.muon_direction(U), M.newton_schulz(U.reshape(40, 18)).reshape(U.shape))
    close(M.muon_direction(U, "flattened"), np.sqrt(40 / 18) * M.muon_direction(U))
    wide = U.reshape(2, 360)
    close(M.muon_direction(wide), M.newton_schulz(wide))
    close(M.muon_direction(wide.T), np.sqrt(180) * M.newton_schulz(wide.T))


@pytest.mark.parametrize("nesterov", [True, False])
def test_local_muon_is_muon_with_heavy_ball_momentum(nesterov: bool) -> None:
    """The scale of the momentum goes in the orthogonalisation; Nesterov's look-ahead and the scaled decay do not."""
    y, B, part, lr, beta, scale, decay = START.copy(), 0.0, T.TENSORS[2], 0.1, 0.9, 0.5, 0.2
    x = path("localmuon", MUON | {"decay": decay, "nesterov": nesterov}, plan([3], 1, lr), given := Trace(), START)
    for g in given.gradients:
        B = beta * B + g[part]
        orthogonal = M.muon_direction((g[part] + beta * B if nesterov else B).reshape(T.CLASSES, T.HIDDEN)).ravel()
        y[part] -= lr * scale * (orthogonal + decay * y[part])
    close(x[0][part], y[part], rtol=1e-6)


class Trace:
    """The gradient of client 1's data, which remembers its values."""

    def __init__(self) -> None:
        self.gradients: list[np.ndarray] = []

    def __call__(self, y: np.ndarray, batch: np.ndarray) -> np.ndarray:
        self.gradients.append(GRADIENT(y, CLIENTS[1]))
        return self.gradients[-1]


def test_fedmuon_without_alignment_starts_as_local_muon() -> None:
    """alpha = 0: round 1 is Local Muon; later rounds start from the mean momentum."""
    rounds, o = plan(FULL, 2), MUON | {"decay": 0.1, "alpha": 0.0}
    fedmuon, local = path("fedmuon", o, rounds), path("localmuon", o, rounds)
    close(fedmuon[0], local[0])
    assert differ(fedmuon[1], local[1])


def test_fedmuons_gain_is_one() -> None:
    """g_a+ = (1 - alpha) A + alpha g_a with A the mean direction: with constant gradients it tends to A."""
    g = np.random.default_rng(0).standard_normal(T.SIZE)
    rounds = plan([2], 60, 0.01)
    x = path("fedmuon", MUON | {"alpha": 0.5}, rounds, lambda y, batch: g)
    A = np.sign(g)  # AdamW's direction
    for part, shape in zip(T.TENSORS, T.SHAPES.values(), strict=True):
        if len(shape) > 1:
            A[part] = 0.5 * M.muon_direction(g[part].reshape(shape)).ravel()
    close(x[-1] - x[-2], -0.01 * 2 * A, rtol=1e-5)


# --- Delta-SGD ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["same_batch", "consecutive"])
def test_deltasgd_without_growth_or_bound_is_fedavg(gradients: str) -> None:
    """delta = 0, gamma huge: all steps have the rate eta_0. K = 1: whatever delta and gamma."""
    fedavg = path("fedavg", SGD | {"decay": 0.2}, plan(FULL, 2))
    o = DELTA | {"gradients": gradients, "decay": 0.2}
    close(path("deltasgd", o | {"delta": 0.0, "gamma": 1e30}, plan(FULL, 2)), fedavg)
    assert differ(path("deltasgd", o, plan(FULL, 2)), fedavg)
    close(path("deltasgd", o, plan([1] * 4, 2), quadratic, [0.0, 0.0]),
          path("fedavg", SGD | {"decay": 0.2}, plan([1] * 4, 2), quadratic, [0.0, 0.0]))  # fmt: skip


def test_deltasgds_readings_agree_on_full_batches() -> None:
    """C48: the previous gradient of the same batch is the previous gradient."""
    close(*(path("deltasgd", DELTA | {"gradients": g}, plan(FULL, 3)) for g in ("same_batch", "consecutive")))


def test_deltasgds_step_size_grows_by_the_recursion() -> None:
    """Constant gradients: nothing bounds eta, and theta_k = sqrt(1 + delta theta_(k-1))."""
    theta, eta, total = 1.0, 0.2, 0.2
    for _ in range(49):
        theta = np.sqrt(1 + 0.1 * theta)
        eta = eta * theta
        total += eta
    assert theta == pytest.approx((0.1 + np.sqrt(0.1**2 + 4)) / 2)
    close(path("deltasgd", DELTA, plan([50], 1, 0.2), lambda y, batch: np.ones(1), np.zeros(1))[0], [-total])


def test_deltasgd_on_a_round_quadratic() -> None:
    """F = a ||y - c||^2 / 2: the bound is gamma / (2a); with gamma = 2 the second step lands on c."""
    o = DELTA | {"delta": 1e6}  # growth enough
    end = path("deltasgd", o, plan([2], 1, 0.01), lambda y, batch: 3.0 * (y - 2.0), np.zeros(3))[0]
    close(end, 2 * np.ones(3))
    half = path("deltasgd", o | {"gamma": 1.0}, plan([2], 1, 0.01), lambda y, batch: 3.0 * (y - 2.0), np.zeros(3))[0]
    close(half, 2 - 2 * 0.97 / 2)  # y_1 = 2 - 2 (1 - .03), then half of the way


def test_deltasgd_forgets_the_scale_of_the_loss() -> None:
    """F times s and eta_0 over s: the same path."""
    shapes = [
        path("deltasgd", DELTA, plan(FULL, 2, 0.4 / s), lambda y, b, s=s: s * GRADIENT(y, b)) for s in (1.0, 50.0)
    ]
    close(*shapes)


# --- FedSPS -------------------------------------------------------------------------------------------------------


def test_the_loss_has_the_gradient() -> None:
    """Central differences."""
    for j in range(0, T.SIZE, 5):
        e = 1e-5 * np.eye(T.SIZE)[j]
        up, down = (M.cross_entropy(GRADIENT, START + s * e, CLIENTS[1]) for s in (1, -1))
        assert (up - down) / 2e-5 == pytest.approx(GRADIENT(START, CLIENTS[1])[j], abs=1e-8)


def test_fedsps_at_its_ceiling_is_fedavg() -> None:
    """c = 0 nearly: every step has the rate gamma_b. c huge: none moves."""
    o = SPS | {"decay": 0.2, "server_lr": 0.7}
    close(path("fedsps", o | {"c": 1e-30}, plan(FULL, 2)), path("fedavg", o, plan(FULL, 2)))
    close(path("fedsps", o | {"c": 1e30}, plan(FULL, 1))[0], START)
    assert differ(path("fedsps", o, plan(FULL, 1, 10.0)), path("fedavg", o, plan(FULL, 1, 10.0)))


def test_fedsps_on_quadratics(monkeypatch: pytest.MonkeyPatch) -> None:
    """F = a ||y - z||^2 / 2, minimum 0: gamma = 1 / (2 c a), so c = 1/2 lands on z; with F >= 1, l* = 1 does."""
    z, a = np.array([1.0, -2.0]), 3.0
    monkeypatch.setattr(M, "cross_entropy", lambda gradient, y, batch: a / 2 * ((y - z) ** 2).sum() + 1)
    rounds, start = plan([1], 1, 10.0), np.array([4.0, 4.0])
    end = path("fedsps", SPS | {"lower_bound": 1.0}, rounds, lambda y, batch: a * (y - z), start)[0]
    close(end, z)
    shorter = path("fedsps", SPS | {"lower_bound": 1.0, "c": 1.0}, rounds, lambda y, batch: a * (y - z), start)[0]
    close(shorter, (start + z) / 2)
    close(path("fedsps", SPS | {"lower_bound": 1.0}, rounds, lambda y, batch: a * (y - z), z)[0], z)  # g = 0: no NaN
    close(path("fedsps", SPS | {"lower_bound": 1e9}, rounds, lambda y, batch: a * (y - z), start)[0], start)


def test_fedsps_takes_the_decay_into_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """C58: F = 0 and decay a are the quadratic a ||y||^2 / 2."""
    monkeypatch.setattr(M, "cross_entropy", lambda gradient, y, batch: 0.0)
    x = path("fedsps", SPS | {"decay": 3.0, "c": 1.0}, plan([1], 1, 10.0), lambda y, batch: 0 * y, np.ones(2))
    close(x[0], np.full(2, 0.5))


def test_fedsps_comes_closer_where_clients_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpolation, c >= 1/2: the distance to the common minimum never grows."""
    monkeypatch.setattr(M, "cross_entropy", lambda g, y, batch: (CURVATURES[batch[0]] * y**2).sum() / 2)
    x = path("fedsps", SPS, plan([5] * 4, 20, 1e9), lambda y, b: CURVATURES[b[0]] * y, [3.0, -5.0])
    distances = np.sqrt((x**2).sum(1))
    assert (np.diff(distances) <= 0).all()
    assert distances[-1] < 1e-3


# --- Scaffnew -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [0.1, lambda r: 0.1 * 0.8**r], ids=["constant", "schedule"])
def test_scaffnew_is_scaffold_with_half_the_messages(lr: Any) -> None:
    """All clients, equal K, p = 1/K, server rate 1: h_i = c_i - c."""
    rounds = plan(FULL, 4, lr)
    o = SGD | {"scale": 1.0, "control": "mean_gradient", "clip_direction": np.inf, "decay": 0.1}
    scaffold = path("scaffold", o, rounds)
    close(path("scaffnew", SCAFFNEW | {"decay": 0.1}, rounds), scaffold)
    assert differ(path("fedavg", SGD | {"decay": 0.1}, rounds)[1:], scaffold[1:])


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_scaffnew_finds_the_optimum_of_all_clients(p: float) -> None:
    """Whatever the K_i, the h_i sum to zero and end as the clients' gradients at the optimum (C62)."""
    rounds = plan([2, 3, 10, 5], 250, 0.2)
    for record in M.scaffnew(np.zeros(2), rounds, quadratic, Options(**SCAFFNEW | {"p": p})):
        h = np.array([record.clients[i]["h"] for i in range(4)])
        close(h.sum(0) + 1, np.ones(2))
    close(record.server["x"], OPTIMUM, rtol=1e-9)
    close(h, CURVATURES * (OPTIMUM - CENTRES), rtol=1e-8)


def test_scaffnew_loses_the_optimum_without_some_clients() -> None:
    """C63: it converges, to a model that depends on the draw."""
    draw = np.random.default_rng(0)
    cohorts = [draw.choice(4, size=2, replace=False) for _ in range(300)]
    x = path("scaffnew", SCAFFNEW, plan([10] * 4, 300, 0.2, cohorts), quadratic, [0.0, 0.0])
    close(x[-1], x[-100], rtol=1e-9)
    assert differ(x[-1], OPTIMUM, 0.05)


def test_scaffnew_with_single_steps_is_sgd() -> None:
    """K = p = 1, all clients: x - eta mean g."""
    rounds = plan([1] * 4, 5)
    close(path("scaffnew", SCAFFNEW, rounds, quadratic, [0.0, 0.0]), path("fedavg", SGD, rounds, quadratic, [0.0, 0.0]))


# --- FedLALR ------------------------------------------------------------------------------------------------------


def test_fedlalr_is_fedams_with_other_options() -> None:
    """The running maximum never falls, so max(v_hat, mean v_hat_K) is the mean, and both of its starts are 1e-16."""
    rounds = plan(FULL, 3, 0.01)
    fedams = SGD | {"v_init": 1e-16, "m_init": 0.0, "eps": 0.0, "beta1": 0.9, "beta2": 0.995, "sync": True,
                    "sync_every": 1, "second_moment": "running", "momentum": "average", "v_seed": "server",
                    "first_round": "frozen", "decay_form": "l2"}  # fmt: skip
    for record, expected in zip(
        T.fedams(START, rounds, GRADIENT, Options(**fedams)),
        M.fedlalr(START, rounds, GRADIENT, Options(by_examples=False, beta1=0.9, beta2=0.995, eps=1e-8)),
        strict=True,
    ):
        for field in ("x", "m", "v_hat"):
            close(record.server[field], expected.server[field], field)
