"""Muon on the clients (Local Muon, FedMuon): PyTorch's optimiser as an oracle, reductions, invariants."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim._muon import muon
from torch.utils.flop_counter import FlopCounterMode

import lamina
import more_transcriptions
import transcriptions as T  # noqa: N812
from given_rounds import ALONE, GRADIENT, history, rounds_of, rounds_of_one_client
from lamina import BadInput, Layers
from lamina.algorithms import localmuon
from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.algorithms.localmuon import COEFFICIENTS, newton_schulz
from lamina.engines.devices import arithmetic
from paper_problem import (
    LAYERS,
    START,
    close,
    differ,
    federate,
    first_path,
    infos,
    make,
    simulate,
    trajectory,
    vectors,
)

BOTH = pytest.mark.parametrize("name", ["localmuon", "fedmuon"])
OTHERS = T.MATRICES == 0
WEIGHTS = [T.TENSORS[i] for i, shape in enumerate(T.SHAPES.values()) if len(shape) > 1]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


# --- the Newton-Schulz iteration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 30), (30, 6), (4, 4)])
def test_newton_schulz_makes_matrices_nearly_orthogonal(shape: tuple[int, int]) -> None:
    """U = P S Q' becomes P S' Q', S' in [.68, 1.21] if the least of S is above .002 of the Frobenius norm."""
    p, _, q = torch.linalg.svd(normal(3, *shape), full_matrices=False)
    s = torch.logspace(0, -2, min(shape), dtype=torch.float64) * torch.tensor([[1e-3], [1.0], [1e3]])
    o = newton_schulz(p * s.unsqueeze(-2) @ q)
    core = p.mT @ o @ q.mT
    close(p @ core @ q, o, rtol=1e-9)  # in the same spaces
    values = core.diagonal(dim1=-2, dim2=-1)
    close(core, torch.diag_embed(values), rtol=1e-9)
    assert float(values.min()) >= 0.68
    assert float(values.max()) <= 1.21


def test_newton_schulz_on_singular_values_is_its_polynomial() -> None:
    """A diagonal matrix stays diagonal, and every entry is mapped by a s + b s^3 + c s^5, five times."""
    s = torch.tensor([0.9, 0.3, 0.02, 0.0], dtype=torch.float64)
    a, b, c = COEFFICIENTS
    expected = s / (s.norm() + 1e-7)
    for _ in range(5):
        expected = a * expected + b * expected**3 + c * expected**5
    close(newton_schulz(torch.diag(s).unsqueeze(0))[0], torch.diag(expected))


def test_newton_schulz_ignores_scale_and_order() -> None:
    """NS(cU) = NS(U), NS(UP) = NS(U)P for a permutation of columns, NS(U') = NS(U)'; a matrix of zeros stays one."""
    u = normal(2, 5, 12)
    o = newton_schulz(u)
    close(newton_schulz(1e3 * u), o, rtol=1e-6)  # all but the constant added to the norm
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    close(newton_schulz(u[..., order]), o[..., order])
    close(newton_schulz(u.mT), o.mT)
    assert (newton_schulz(torch.zeros(1, 3, 4)) == 0).all()


# wide, tall, hardly wide (single iterations), a batch
LONG = pytest.mark.parametrize("shape", [(1, 24, 200), (1, 200, 24), (1, 24, 36), (3, 10, 37)], ids=str)


@LONG
@pytest.mark.parametrize("decades", [0, 6])
def test_newton_schulz_takes_five_plain_iterations(shape: tuple[int, ...], decades: int) -> None:
    """Pairs of iterations equal single ones up to rounding, also where singular values cover six decades."""
    p, _, q = torch.linalg.svd(normal(*shape), full_matrices=False)
    u = p * torch.logspace(0, -decades, min(shape[1:]), dtype=torch.float64) @ q
    expected = more_transcriptions.newton_schulz(u.numpy())
    for o, rtol in ((newton_schulz(u), 1e-12), (newton_schulz(u.float()), 1e-4)):
        assert float(np.abs(o.numpy() - expected).max()) <= rtol * np.abs(expected).max()


@LONG
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_matrices_take_fewer_operations(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Products with n^2 m and n^3 multiplications: 10 and 5, or 6 and 11; never in bfloat16, which rounds too much."""
    n, m = sorted(shape[1:])
    with FlopCounterMode(display=False) as counter:
        newton_schulz(normal(*shape).to(dtype))
    long, short = (6, 11) if 2 * m > 3 * n and dtype == torch.float32 else (10, 5)
    assert counter.get_total_flops() == shape[0] * 2 * (long * n * n * m + short * n**3)


@LONG
@pytest.mark.parametrize("rank", [8, 1000])
def test_factors_in_float16_keep_small_singular_values_small(
    shape: tuple[int, ...], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With x itself in float16, values of zero would grow. A CPU has no product of mixed types: it is imitated."""
    usual = torch.baddbmm

    def mixed(added: Tensor, p: Tensor, q: Tensor, *out_type: torch.dtype, **options: Any) -> Tensor:
        return usual(added, *((p.float(), q.float()) if out_type else (p, q)), **options)

    monkeypatch.setattr(torch, "baddbmm", mixed)
    monkeypatch.setattr(localmuon, "_multiply_halves", lambda x: True)
    p, s, q = torch.linalg.svd(normal(*shape), full_matrices=False)
    u = (p * s.masked_fill(torch.arange(s.shape[-1]) >= rank, 0.0).unsqueeze(-2) @ q).float()
    expected = more_transcriptions.newton_schulz(u.double().numpy())
    o = newton_schulz(u).numpy()
    assert 1e-4 < np.linalg.norm(o - expected) / np.linalg.norm(expected) < 1.5e-2
    close(u, (p * s.masked_fill(torch.arange(s.shape[-1]) >= rank, 0.0).unsqueeze(-2) @ q).float())  # as it was given


@pytest.mark.parametrize(
    ("tf32", "generation", "dtype", "expected"),
    [
        (True, (9, 0), torch.float32, True),
        (False, (9, 0), torch.float32, False),
        (True, (7, 5), torch.float32, False),  # has no TF32
        (True, (9, 0), torch.bfloat16, False),
    ],
)
def test_factors_are_halves_where_tf32_would_round_them(
    tf32: bool, generation: tuple[int, int], dtype: torch.dtype, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    x: Any = SimpleNamespace(is_cuda=True, dtype=dtype, requires_grad=False, device="cuda:0")
    with arithmetic("tf32" if tf32 else "fp32"):
        assert localmuon._multiply_halves(x) is expected


@LONG
def test_matrices_of_a_batch_do_not_touch(shape: tuple[int, ...]) -> None:
    """Zeros stay zeros, and NaN stays in its matrix."""
    u = normal(3, *shape[1:])
    spoilt = torch.cat([u, u[:2]])
    spoilt[3, 0, 1], spoilt[4] = torch.nan, 0.0
    o = newton_schulz(spoilt)
    close(o[:3], newton_schulz(u), rtol=1e-12)
    assert o[3].isnan().any()
    assert (o[4] == 0).all()


# --- oracles ------------------------------------------------------------------------------------------------------


class TorchMuon:
    """PyTorch's Muon on the weights, and the formula of AdamW on the biases."""

    def __init__(self, beta: float, nesterov: bool) -> None:
        self.theta, self.beta, self.nesterov = START.copy(), beta, nesterov
        self.buffers = [torch.zeros(T.SHAPES[n], dtype=torch.float64) for n in ("fc1.weight", "fc2.weight")]
        self.forget()

    def forget(self) -> None:
        """Restart AdamW."""
        self.m, self.v, self.count = np.zeros(T.SIZE), np.zeros(T.SIZE), 0

    def take_steps(self, lr: float, batches: list[np.ndarray]) -> None:
        """Take a step on each of these batches: c = .5, lambda = .2, beta_1 = .8, beta_2 = .9, eps = 1e-4."""
        for batch in batches:
            g = GRADIENT(self.theta, batch)
            self.count += 1
            self.m, self.v = 0.8 * self.m + 0.2 * g, 0.9 * self.v + 0.1 * g * g
            psi = self.m / (1 - 0.8**self.count) / (np.sqrt(self.v / (1 - 0.9**self.count)) + 1e-4)
            after = self.theta - lr * (psi + 0.2 * self.theta)
            for buffer, part in zip(self.buffers, WEIGHTS, strict=True):
                weight, grad = (torch.from_numpy(u[part].reshape(buffer.shape).copy()) for u in (self.theta, g))
                muon(
                    [weight], [grad], [buffer], lr=0.5 * lr, weight_decay=0.2, momentum=self.beta, ns_steps=5,
                    nesterov=self.nesterov, ns_coefficients=COEFFICIENTS, eps=1e-7, adjust_lr_fn="original",
                    has_complex=False,
                )  # fmt: skip
                after[part] = weight.numpy().ravel()
            self.theta = after


@pytest.mark.parametrize("nesterov", [True, False])
@BOTH
def test_one_client_runs_muon(name: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha = 0, eta_g = 1: x+ = y_K. FedMuon's momentum continues in the next round, Local Muon's starts from zero.

    PyTorch's Muon adds nothing to the norm, and rounds to bfloat16, which is left out here.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    given = {
        "muon_scale": 0.5,
        "beta": 0.9,
        "beta1": 0.8,
        "beta2": 0.9,
        "eps": 1e-4,
        "decay": 0.2,
        "nesterov": nesterov,
    }
    given |= {"alpha": 0.0} if name == "fedmuon" else {}
    simulation, oracle = simulate(make(name, given), lr=0.02, **ALONE), TorchMuon(0.9, nesterov)
    for lr, batches in rounds_of_one_client(simulation, 3):
        oracle.forget()
        if name == "localmuon":
            oracle.buffers = [torch.zeros_like(buffer) for buffer in oracle.buffers]
        oracle.take_steps(lr, batches)
        close(simulation.state.server.x, oracle.theta, rtol=1e-6)
    if name == "fedmuon":
        m = simulation.state.server.m.numpy()
        for buffer, part in zip(oracle.buffers, WEIGHTS, strict=True):
            close(m[part], buffer.flatten(), rtol=1e-5)
        assert (m[OTHERS] == 0).all()


# --- reductions and invariants ------------------------------------------------------------------------------------


@BOTH
def test_tensors_that_are_no_matrices_follow_local_adamw(name: str) -> None:
    """Given the same gradients, biases move as in Local AdamW at the rate eta (1 - alpha): g_a = 0 in round 1."""
    numbers = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-4, "decay": 0.3}
    x, grads, weight = vectors(seed=4), vectors(4, seed=6), 0.5 if name == "fedmuon" else 1.0
    ours = first_path(make(name, {**numbers, "muon_scale": 3.0}), x, grads, lr=0.07)
    adamw = first_path(make("localadamw", numbers), x, grads, lr=0.07 * weight)
    for y, expected in zip(ours, adamw, strict=True):
        close(y[OTHERS], expected[OTHERS])
    assert differ(ours[-1][~OTHERS], adamw[-1][~OTHERS])


def test_fedmuon_without_what_it_adds_is_local_muon() -> None:
    """alpha = 0, and the momentum is not sent: Local Muon. With it, round 2 differs."""
    given = {"beta": 0.9, "server_lr": 0.8, "decay": 0.2}
    fedmuon, local = make("fedmuon", {**given, "alpha": 0.0}), make("localmuon", given)
    ours, theirs = fedmuon.init(vectors(seed=3), LAYERS), local.init(vectors(seed=3), LAYERS)
    for r in (1, 2):
        grads, info = vectors(3, 2, seed=10 + r), infos(r, 0.1, 2)
        sent = federate(fedmuon, ours, grads, info)
        ours = federate(fedmuon, ours._replace(m=torch.zeros_like(ours.m)), grads, info)
        theirs = federate(local, theirs, grads, info)
        close(ours.x, theirs.x)
    assert differ(sent.x, theirs.x)


def test_fedmuons_direction_has_gain_one() -> None:
    """g_a+ = (1 - alpha) A + alpha g_a, A the clients' mean step; with A constant, A (1 - alpha^r).

    The gradient is the same in all steps, so that A = c O of it (Muon), and its sign (AdamW).
    """
    grads = [vectors(seed=9).expand(3, 2, -1)] * 6
    algorithm = make("fedmuon", {"alpha": 0.6, "decay": 0.0, "eps": 1e-30, "muon_scale": 2.0})
    A = vectors(seed=9).sign()
    for name, part in zip(("fc1.weight", "fc2.weight"), WEIGHTS, strict=True):
        rows, cols = T.SHAPES[name]
        o = newton_schulz(vectors(seed=9)[part].reshape(1, rows, cols)) * max(1, rows / cols) ** 0.5
        A[part] = 2.0 * o.flatten()
    for r, (_, after, D) in enumerate(history(algorithm, grads), 1):
        close(after.g_a, (1 - 0.6**r) * A, rtol=1e-4)  # m is shorter than g at first, beside the constant in the norm
        close(D, -0.1 * 2 * after.g_a)


def test_the_form_of_the_average_does_not_matter() -> None:
    """O of the heavy-ball momentum b+ = beta b + g equals that of the average m: m = (1 - beta) b."""
    b, m = torch.zeros(1, 4, 7, dtype=torch.float64), torch.zeros(1, 4, 7, dtype=torch.float64)
    for k in range(5):
        g = normal(1, 4, 7, seed=k)
        b, m = 0.9 * b + g, 0.9 * m + 0.1 * g
        close(newton_schulz(g + 0.9 * b), newton_schulz(0.1 * g + 0.9 * m), rtol=1e-6)


def test_muon_forgets_the_scale_of_the_gradients() -> None:
    """All gradients times c, and AdamW without epsilon: momentum times c, and x unchanged."""
    ends = []
    for scale in (1.0, 64.0):
        *_, (_, end, _) = history(make("fedmuon", {"eps": 0.0}), [scale * g for g in rounds_of(1.0, 2.0, 0.5)])
        ends.append(end)
    close(ends[1].x, ends[0].x, rtol=1e-6)
    close(ends[1].m, 64.0 * ends[0].m)


@BOTH
def test_bfloat16_is_close_to_full_arithmetic(name: str) -> None:
    """They differ, by the precision of bfloat16."""
    full, low = (trajectory(name, {"arithmetic": kind}, 2) for kind in ("model", "bfloat16"))
    assert differ(low, full, 1e-6)
    close(low, full, rtol=2e-2)


# --- which tensors are matrices -----------------------------------------------------------------------------------

SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "conv.weight": (9, 2, 2, 2), "tokens": (2, 5, 3), "z.weight": (2, 7)}
MIXED = Layers(SHAPES)


def one_step(given: dict[str, Any]) -> dict[str, Tensor]:
    """Return the first step of Local Muon on the layers above, divided by the rate, by name; y = 0."""
    algorithm = make("localmuon", {"decay": 0.0, "muon_scale": 1.0, "nesterov": False, "eps": 0.0, **given})
    algorithm.check_model(MIXED)
    grad, info = normal(MIXED.size), ClientInfo(1, 0.5, MIXED)
    down = algorithm.broadcast(algorithm.init(torch.zeros_like(grad), MIXED), ServerInfo(1, 0.5, MIXED))
    local = algorithm.step(algorithm.begin(down, algorithm.client_init(down.x, MIXED), info), down, grad, 0.5, MIXED)
    return MIXED.unflatten(-local.y / 0.5)


def test_every_kind_of_tensor() -> None:
    """Weights and kernels as matrices, three axes as a batch of them, s = sqrt(rows/cols) of tall ones; else: sign."""
    grads, step = MIXED.unflatten(normal(MIXED.size)), one_step({})
    close(step["a.bias"], grads["a.bias"].sign())
    close(step["a.weight"], (4 / 3) ** 0.5 * newton_schulz(grads["a.weight"].unsqueeze(0))[0], rtol=1e-5)
    close(step["z.weight"], newton_schulz(grads["z.weight"].unsqueeze(0))[0], rtol=1e-5)
    close(step["tokens"], (5 / 3) ** 0.5 * newton_schulz(grads["tokens"]), rtol=1e-5)
    kernel = newton_schulz(grads["conv.weight"].reshape(1, 9, 8)).reshape(9, 2, 2, 2)
    close(step["conv.weight"], kernel, rtol=1e-5)
    close(one_step({"conv_scale": "flattened"})["conv.weight"], (9 / 8) ** 0.5 * kernel, rtol=1e-5)


def test_the_first_and_the_last_matrix_may_be_left_out() -> None:
    """With muon_on = "hidden" they take AdamW's first step, the sign of the gradient; the others are as before."""
    every, hidden = one_step({}), one_step({"muon_on": "hidden"})
    for name, grad in MIXED.unflatten(normal(MIXED.size)).items():
        close(hidden[name], grad.sign() if name in ("a.weight", "z.weight") else every[name])


@BOTH
@pytest.mark.parametrize("muon_on", ["matrices", "hidden"])
def test_one_tensor_at_a_time_is_the_same_step(name: str, muon_on: str) -> None:
    """An engine may hand whole vectors to the algorithm, or one tensor, which knows its place in the model."""
    algorithm, grad = make(name, {"muon_on": muon_on, "decay": 0.1}), normal(MIXED.size)
    x, info = normal(MIXED.size, seed=1), ClientInfo(2, 0.5, MIXED)
    server = algorithm.init(x, MIXED)
    server = server if name == "localmuon" else server._replace(m=normal(MIXED.size, seed=2), g_a=grad.roll(1))
    down = algorithm.broadcast(server, ServerInfo(2, 0.5, MIXED))
    local = algorithm.begin(down, algorithm.client_init(x, MIXED), info)
    whole, places = algorithm.step(local, down, grad, 0.5, MIXED), np.cumsum([0, *MIXED.sizes])

    def part(record: Any, i: int) -> Any:
        cut = slice(places[i], places[i + 1])
        return type(record)(*(value if value.shape[-1] == 1 else value[cut] for value in record))

    for i, layers in enumerate(MIXED.parts()):
        alone = algorithm.step(part(local, i), part(down, i), grad[places[i] : places[i + 1]], 0.5, layers)
        for one, other in zip(alone, part(whole, i), strict=True):
            close(one, other)


@BOTH
def test_kernels_stored_with_their_channels_last_take_the_same_step(name: str) -> None:
    """The columns of a kernel stand in another order, and their step, too."""
    algorithm, last = make(name), MIXED.channels_last()
    assert last is not None
    grads, x = normal(3, MIXED.size), normal(MIXED.size, seed=1)
    ends = []
    for layers, order in ((MIXED, torch.arange(MIXED.size)), (last, last.order)):
        down = algorithm.broadcast(algorithm.init(x[order], layers), ServerInfo(1, 0.5, layers))
        local = algorithm.begin(down, algorithm.client_init(x, layers), ClientInfo(1, 0.5, layers))
        for grad in grads:
            local = algorithm.step(local, down, grad[order], 0.5, layers)
        ends.append(local)
    assert (last.order != torch.arange(MIXED.size)).any()
    for one, other in zip(*ends, strict=True):
        close(other, one if one.shape[-1] == 1 else one[last.order])


# --- what is refused ----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("given", "shapes", "text"),
    [
        (
            {},
            {"scale": (3,), "shift": (3,)},
            "Muon orthogonalises matrices, and no trained tensor of the model has two",
        ),
        ({"muon_on": "hidden"}, T.SHAPES, 'muon_on = "hidden" leaves out the first and the last matrix'),
    ],
    ids=["no matrix", "no hidden one"],
)
def test_a_model_without_matrices_is_refused_in_one_line(name: str, given: Any, shapes: Any, text: str) -> None:
    with pytest.raises(BadInput, match=text) as caught:
        make(name, given).check_model(Layers(shapes))
    assert "\n" not in str(caught.value)


def test_a_run_refuses_such_a_model() -> None:
    with pytest.raises(BadInput, match="choose another algorithm"):
        lamina.Simulation(torch.nn.BatchNorm1d(4), (torch.randn(8, 4), torch.arange(8) % 4), "fedmuon", clients=2)


def test_members_of_a_population_may_differ_in_numbers() -> None:
    """A column of options beside leading axes is each experiment alone."""
    both = dataclasses.replace(
        make("fedmuon"), muon_scale=torch.tensor([[0.5], [2.0]]), alpha=torch.tensor([[0.1], [0.7]])
    )
    grads, x = normal(2, 3, 2, MIXED.size).float(), normal(MIXED.size, seed=1).float()

    def run(algorithm: Any, grads: Any, x: Tensor) -> Tensor:
        down = algorithm.broadcast(algorithm.init(x, MIXED)._replace(g_a=x + 1), ServerInfo(1, 0.5, MIXED))
        local = algorithm.begin(down, None, ClientInfo(1, 0.5, MIXED))
        for grad in grads:
            local = algorithm.step(local, down, grad, 0.5, MIXED)
        return local.y

    together = run(both, grads.permute(1, 2, 0, 3), x.expand(2, -1).unsqueeze(0))  # [clients, members, p]
    for i, (scale, alpha) in enumerate(((0.5, 0.1), (2.0, 0.7))):
        for c in range(2):
            alone = run(make("fedmuon", {"muon_scale": scale, "alpha": alpha}), grads[i, :, c], x)
            close(together[c, i], alone, rtol=1e-4)
