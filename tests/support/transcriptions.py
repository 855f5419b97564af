"""Every algorithm's pseudo-code in numpy float64, written from the papers and their register of ambiguities only.

Nothing here shares code with `lamina.algorithms`. A transcription is a generator

    name(x0, rounds, gradient, o)

over `rounds` (the library's plan: who trains, on which batches, at which rate), a `Gradient` and the options `o`. After
every round it yields a `Record`. Symbols follow the papers: x server model, y local model, delta = y_K - x, `mean` over
the active clients. `o` must be complete: defaults are the library's business. The l.N are the paper's line numbers, the
A and B numbers those of the register of ambiguities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace as Options
from typing import Any

import numpy as np
import torch
from torch import nn

Array = np.ndarray


@dataclass
class Record:
    """The state after a round: the server's tensors, every client's tensors, and what the clients uploaded."""

    server: dict[str, Array]
    clients: dict[int, dict[str, Array]] = field(default_factory=dict)
    deltas: list[Array] = field(default_factory=list)
    directions: list[Array] = field(default_factory=list)  # FedLADA: every m_k / sqrt(v_hat_k) of the round


# --- the model: a two-layer tanh network with softmax cross-entropy ------------------------------------------------

INPUTS, HIDDEN, CLASSES = 4, 5, 3
SHAPES = {
    "fc1.weight": (HIDDEN, INPUTS),
    "fc1.bias": (HIDDEN,),
    "fc2.weight": (CLASSES, HIDDEN),
    "fc2.bias": (CLASSES,),
}
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
SIZE = sum(SIZES)
TENSORS = [slice(a, b) for a, b in zip(np.cumsum([0, *SIZES[:-1]]), np.cumsum(SIZES), strict=True)]
MODULES = [slice(TENSORS[0].start, TENSORS[1].stop), slice(TENSORS[2].start, TENSORS[3].stop)]
MATRICES = np.concatenate([np.full(n, float(len(s) > 1)) for n, s in zip(SIZES, SHAPES.values(), strict=True)])


class Network(nn.Module):
    """The same network in torch, float64, starting from a flat vector."""

    def __init__(self, start: Array) -> None:
        super().__init__()
        self.fc1 = nn.Linear(INPUTS, HIDDEN, dtype=torch.float64)
        self.fc2 = nn.Linear(HIDDEN, CLASSES, dtype=torch.float64)
        with torch.no_grad():
            for parameter, part in zip(self.parameters(), TENSORS, strict=True):
                parameter.copy_(torch.from_numpy(start[part].reshape(parameter.shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.fc2(torch.tanh(self.fc1(x)))


def start_vector(seed: int = 0) -> Array:
    """Random weights, zero biases."""
    return 0.5 * np.random.default_rng(seed).standard_normal(SIZE) * MATRICES


@dataclass(frozen=True)
class Gradient:
    """The mean gradient over some samples, by hand; mini-batch gradients are scaled down to the norm `clip`."""

    inputs: Array
    labels: Array
    clip: float = np.inf

    def __call__(self, theta: Array, samples: Array) -> Array:
        """A mini-batch gradient."""
        return clipped(self.full(theta, samples), self.clip)

    def full(self, theta: Array, samples: Array) -> Array:
        """The gradient over all of a client's samples."""
        w1, b1, w2, b2 = (theta[part].reshape(shape) for part, shape in zip(TENSORS, SHAPES.values(), strict=True))
        x, t = self.inputs[samples], self.labels[samples]
        hidden = np.tanh(x @ w1.T + b1)
        logits = hidden @ w2.T + b2
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        d_logits = (p - np.eye(CLASSES)[t]) / len(t)
        d_hidden = (d_logits @ w2) * (1 - hidden**2)
        return np.concatenate(
            [(d_hidden.T @ x).ravel(), d_hidden.sum(0), (d_logits.T @ hidden).ravel(), d_logits.sum(0)]
        )


def clipped(g: Array, largest: float) -> Array:
    """g, scaled down to norm `largest` if it is longer."""
    norm = np.sqrt((g**2).sum())
    return g * (largest / norm) if norm > largest else g


# --- pieces that several cards share, as the cards word them ------------------------------------------------------


def averager(rnd: Any, by_examples: bool) -> Callable[[list[Any]], Any]:
    """mean_i: uniform over the active clients, or weighted by their number of examples."""
    n = np.array([len(s) for s in rnd.samples], dtype=float)
    w = n / n.sum() if by_examples else np.full(len(n), 1 / len(n))
    return lambda values: sum(w_i * v for w_i, v in zip(w, values, strict=True))


def batches(rnd: Any, c: int) -> list[Array]:
    """The batches of the c-th active client: K_i of them."""
    return [rnd.batch(c, k) for k in range(int(rnd.steps[c]))]


def rate_factor(o: Options, r: int) -> float:
    """What the correction of the server's rate multiplies it by in round r (C68)."""
    t = {"none": np.inf, "round": r, "next_round": r + 1}[o.rate_correction]
    return float(np.sqrt(1 - o.beta2**t) / (1 - o.beta1**t))


def l2(o: Options, y: Array) -> Array | float:
    """What L2 decay adds to the gradient."""
    return o.decay * y if o.decay_form == "l2" else 0.0


def decoupled(o: Options, y: Array) -> Array | float:
    """What decoupled decay adds to the direction."""
    return o.decay * y if o.decay_form == "decoupled" else 0.0


def layerwise(o: Options, y: Array, psi: Array) -> Array:
    """phi(||y||) u / ||u|| for every layer, u = psi + lambda y; step 0 if ||u|| = 0 (Fed-LAMB eq. 3, A10-A12)."""
    u = psi + (o.decay * y if o.decay_form == "ratio" else 0.0)
    out = np.zeros_like(u)
    for part in {"tensor": TENSORS, "module": MODULES, "model": [slice(None)]}[o.layers]:
        norm_y, norm_u = np.sqrt((y[part] ** 2).sum()), np.sqrt((u[part] ** 2).sum())
        if norm_u == 0:
            continue
        phi = min(norm_y, o.phi_max)  # "literal": the identity, no floor
        if o.zero_norm == "floor":
            phi = min(max(norm_y, o.phi_min), o.phi_max)
        if o.zero_norm == "lamb" and norm_y == 0:  # the ratio phi / ||u|| is 1
            phi = norm_u
        out[part] = phi * u[part] / norm_u
    return out


# --- SGD clients ----------------------------------------------------------------------------------------------


def fedavg(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Local SGD, then the mean."""
    x = x0.copy()
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c in range(len(rnd.cohort)):
            y = x.copy()
            for batch in batches(rnd, c):
                y = y - rnd.lr * (gradient(y, batch) + o.decay * y)
            deltas.append(y - x)
        x = x + o.server_lr * mean(deltas)
        yield Record({"x": x}, deltas=deltas)


def fedprox(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """FedAvg with the gradient of (mu/2) ||y - x||^2 added."""
    x = x0.copy()
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c in range(len(rnd.cohort)):
            y = x.copy()
            for batch in batches(rnd, c):
                y = y - rnd.lr * (gradient(y, batch) + o.decay * y + o.mu * (y - x))
            deltas.append(y - x)
        x = x + o.server_lr * mean(deltas)
        yield Record({"x": x}, deltas=deltas)


def scaffold(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """SCAFFOLD, option II, with the scale s of FedLADA's eq. 26 (B15)."""
    x, c, own = x0.copy(), np.zeros_like(x0), {}
    for rnd in rounds:
        N = len(rnd.cohort) / rnd.participation  # all clients
        mean, deltas, d_controls = averager(rnd, o.by_examples), [], []
        for a, i in enumerate(rnd.cohort):
            y, c_i, K = x.copy(), own.get(i, np.zeros_like(x0)), int(rnd.steps[a])
            for batch in batches(rnd, a):
                corrected = gradient(y, batch) + o.scale * (c - c_i)
                y = y - rnd.lr * (clipped(corrected, o.clip_direction) + o.decay * y)
            s = 1.0 if o.control == "literal" else o.scale
            own[i] = (x - y) / (K * rnd.lr) - s * (c - c_i)
            deltas.append(y - x)
            d_controls.append(own[i] - c_i)
        x = x + o.server_lr * mean(deltas)
        c = c + sum(d_controls) / N  # whatever the weighting: always c = (1/N) sum of all c_i
        yield Record({"x": x, "c": c}, {i: {"c": c_i} for i, c_i in own.items()}, deltas)


def _fedcm_client(o: Options, x: Array, momentum: Array, rnd: Any, c: int, gradient: Gradient) -> Array:
    y = x.copy()
    for batch in batches(rnd, c):
        mix = o.alpha * (gradient(y, batch) + l2(o, y)) + (1 - o.alpha) * momentum
        y = y - rnd.lr * (clipped(mix, o.clip_direction) + decoupled(o, y))
    return y - x


def fedcm(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Every step is mixed with the last round's mean direction."""
    x, momentum = x0.copy(), np.zeros_like(x0)
    for rnd in rounds:
        mean = averager(rnd, o.by_examples)
        deltas = [_fedcm_client(o, x, momentum, rnd, c, gradient) for c in range(len(rnd.cohort))]
        x = x + o.server_lr * mean(deltas)
        momentum = -mean(deltas) / (rnd.lr * mean(list(rnd.steps)))
        yield Record({"x": x, "momentum": momentum}, deltas=deltas)


def _adam_step(
    o: Options, r: int, D: Array, x: Array, m: Array, v: Array, v_hat: Array
) -> tuple[Array, Array, Array, Array]:
    """Adam on the server, with -D for the gradient: the next x, m, v and v_hat, which is v without a maximum."""
    m = o.beta1 * m + (1 - o.beta1) * D
    v = o.beta2 * v + (1 - o.beta2) * D**2
    v_hat = np.maximum(v_hat, v) if o.amsgrad else v
    m_used, v_used = (m / (1 - o.beta1**r), v_hat / (1 - o.beta2**r)) if o.bias_correction else (m, v_hat)
    step = rate_factor(o, r) * m_used / (np.sqrt(v_used + o.root_eps) + o.tau)
    return x + o.server_lr * step, m, v, v_hat


def fedadam_star(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """FedCM's clients, Adam on the server; FedAdam is alpha = 1."""
    x, m, momentum = x0.copy(), np.zeros_like(x0), np.zeros_like(x0)
    v = v_hat = np.full_like(x0, o.v_init)
    for r, rnd in enumerate(rounds, 1):
        mean = averager(rnd, o.by_examples)
        deltas = [_fedcm_client(o, x, momentum, rnd, c, gradient) for c in range(len(rnd.cohort))]
        D = mean(deltas)
        x, m, v, v_hat = _adam_step(o, r, D, x, m, v, v_hat)
        momentum = -D / (rnd.lr * mean(list(rnd.steps)))
        server = {"x": x, "m": m, "v": v, "momentum": momentum} | ({"v_hat": v_hat} if o.amsgrad else {})
        yield Record(server, deltas=deltas)


def fedadam(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Local SGD, Adam on the server."""
    x, m = x0.copy(), np.zeros_like(x0)
    v = v_hat = np.full_like(x0, o.v_init)
    for r, rnd in enumerate(rounds, 1):
        mean, deltas = averager(rnd, o.by_examples), []
        for c in range(len(rnd.cohort)):
            y = x.copy()
            for batch in batches(rnd, c):
                y = y - rnd.lr * (gradient(y, batch) + o.decay * y)
            deltas.append(y - x)
        x, m, v, v_hat = _adam_step(o, r, mean(deltas), x, m, v, v_hat)
        yield Record({"x": x, "m": m, "v": v} | ({"v_hat": v_hat} if o.amsgrad else {}), deltas=deltas)


# --- the FedLADA family: stateless clients --------------------------------------------------------------------


def _adaptive(o: Options, m: Array, v_hat: Array, r: int, k: int) -> Array:
    """m / (sqrt(v_hat) + eps) in step k of round r, the moments corrected for their start as the option says (B21)."""
    if o.moment_correction == "m" or (o.moment_correction == "first_round" and r == 1):
        m = m / (1 - o.beta1**k)
    root = np.sqrt(v_hat)
    if o.moment_correction == "first_round" and r == 1:
        root = root / np.sqrt(1 - o.beta2**k)
    return m / (root + o.eps)


def localadam(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """FedLADA's Alg. 2, with the second moment averaged (B13) or, sync=False, as printed."""
    x, v_server = x0.copy(), np.full_like(x0, o.v_init)
    for r, rnd in enumerate(rounds, 1):
        mean, deltas, v_up = averager(rnd, o.by_examples), [], []
        for c in range(len(rnd.cohort)):
            y, m, v_hat = x.copy(), np.zeros_like(x), v_server
            v = v_server if o.v_seed == "server" else np.zeros_like(x)
            for k, batch in enumerate(batches(rnd, c), 1):
                g = gradient(y, batch) + l2(o, y)
                m = o.beta1 * m + (1 - o.beta1) * g
                v = o.beta2 * v + (1 - o.beta2) * g**2
                v_hat = np.maximum(v_hat, v) if o.amsgrad else v
                y = y - rnd.lr * (_adaptive(o, m, v_hat, r, k) + decoupled(o, y))
            deltas.append(y - x)
            v_up.append(v_hat)
        x = x + o.server_lr * mean(deltas)
        v_server = mean(v_up) if o.sync else v_server
        yield Record({"x": x} | ({"v": v_server} if o.sync else {}), deltas=deltas)


def fedlada(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """FedLADA's Alg. 3."""
    return _lada(x0, rounds, gradient, o, lambda o, y, psi: psi)


def fedlada_lamb(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """FedLADA whose local direction is scaled to the norm of every layer."""
    return _lada(x0, rounds, gradient, o, layerwise)


def _lada(x0: Array, rounds: Any, gradient: Gradient, o: Options, scale: Any) -> Iterator[Record]:
    x, g_a, v_server = x0.copy(), np.zeros_like(x0), np.full_like(x0, o.v_init)
    for r, rnd in enumerate(rounds, 1):
        full = 1 - (1 - o.alpha) ** r if o.ga_correction else 1.0  # B22: the weights of A_1 ... A_r in g_a, added up
        mean, deltas, v_up, amendments, directions = averager(rnd, o.by_examples), [], [], [], []
        for c in range(len(rnd.cohort)):
            y, m, v_hat = x.copy(), np.zeros_like(x), v_server  # l.5
            v = v_server if o.v_seed == "server" else np.zeros_like(x)  # B3
            for k, batch in enumerate(batches(rnd, c), 1):
                g = gradient(y, batch) + l2(o, y)  # l.7
                m = o.beta1 * m + (1 - o.beta1) * g  # l.8
                v = o.beta2 * v + (1 - o.beta2) * g**2  # l.9
                v_hat = np.maximum(v_hat, v) if o.amsgrad else v  # l.10, B19
                directions.append(scale(o, y, _adaptive(o, m, v_hat, r, k)))  # l.11
                mix = o.alpha * directions[-1] + (1 - o.alpha) * g_a
                y = y - rnd.lr * (mix / full + decoupled(o, y))  # l.12
            deltas.append(y - x)
            v_up.append(v_hat)
            amendments.append((x - y) / (rnd.lr * int(rnd.steps[c])))  # B9
        x_next = x + o.server_lr * mean(deltas)  # l.17
        v_server = mean(v_up)  # l.16
        g_a = (x - x_next) / (o.server_lr * rnd.lr * mean(list(rnd.steps)))  # l.18
        if o.amendment == "per_client":
            g_a = mean(amendments)
        server = {"x": x_next, "v": v_server, "g_a": g_a}  # the library keeps the corrected average
        x, g_a = x_next, g_a * full
        yield Record(server, deltas=deltas, directions=directions)


# --- the Fed-LAMB family: clients that keep their momentum ----------------------------------------------------


def fedlamb(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Fed-LAMB's Alg. 1, blue boxes."""
    return _fed(x0, rounds, gradient, o, layerwise)


def fedams(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Alg. 1 without the layer-wise step: y - eta_l m / sqrt(v_hat)."""
    return _fed(x0, rounds, gradient, o, lambda o, y, psi: psi)


def _fed(x0: Array, rounds: Any, gradient: Gradient, o: Options, scale: Any) -> Iterator[Record]:
    x, v_hat_server, m_server = x0.copy(), np.full_like(x0, o.v_init), np.full_like(x0, o.m_init)
    own: dict[int, dict[str, Array]] = {}
    for r, rnd in enumerate(rounds, 1):
        mean, deltas, v_up, m_up = averager(rnd, o.by_examples), [], [], []
        for c, i in enumerate(rnd.cohort):
            fresh = {"m": np.full_like(x0, o.m_init), "v": np.full_like(x0, o.v_init)}
            fresh["v_hat"] = np.full_like(x0, o.v_init)
            kept = own.get(i, fresh)
            v_hat = v_hat_server if o.sync else kept["v_hat"]  # A17: v_hat_i of the client's own gradients
            y = x.copy()  # l.6
            m = {"carry": kept["m"], "restart": fresh["m"], "average": m_server}[o.momentum]  # A5
            v = kept["v"] if o.v_seed == "client" else v_hat  # l.6, A3
            running = v_hat  # A2
            for batch in batches(rnd, c):
                g = gradient(y, batch) + l2(o, y)  # l.9
                m = o.beta1 * m + (1 - o.beta1) * g  # l.10
                v = o.beta2 * v + (1 - o.beta2) * g**2  # l.11
                running = np.maximum(running, v)
                under = running if o.second_moment == "running" else v_hat
                if r == 1 and o.first_round == "running":
                    under = v
                psi = m / (np.sqrt(under) + o.eps)  # l.12
                y = y - rnd.lr * (scale(o, y, psi) + decoupled(o, y))  # l.13
            own[i] = {"m": m, "v": v, "v_hat": running if o.second_moment == "running" else np.maximum(v_hat, v)}
            deltas.append(y - x)
            v_up.append(running if o.second_moment == "running" else v)  # A2: what the steps divided by
            m_up.append(m)
        x = x + o.server_lr * mean(deltas)  # l.19
        if r % o.sync_every == 0:  # A16
            v_hat_server = np.maximum(v_hat_server, mean(v_up))  # l.20
        m_server = mean(m_up)
        server = {"x": x} | ({"v_hat": v_hat_server} if o.sync else {})
        server |= {"m": m_server} if o.momentum == "average" else {}
        names = ["m"] * (o.momentum == "carry") + ["v"] * (o.v_seed == "client") + ["v_hat"] * (not o.sync)
        yield Record(server, {i: {n: kept[n] for n in names} for i, kept in own.items()}, deltas)


def mimelamb(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Fed-LAMB's Alg. 1, red boxes."""
    return _mime(x0, rounds, gradient, o, layerwise)


def mime(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Alg. 1, red boxes, without the layer-wise step; or Karimireddy et al.'s Mime by its two options (A14)."""
    return _mime(x0, rounds, gradient, o, lambda o, y, psi: psi)


def _mime(x0: Array, rounds: Any, gradient: Gradient, o: Options, scale: Any) -> Iterator[Record]:
    x, m_server = x0.copy(), np.full_like(x0, o.m_init)
    v = v_hat = np.full_like(x0, o.v_init)
    own: dict[int, dict[str, Array]] = {}
    for r, rnd in enumerate(rounds, 1):
        mean, deltas, m_up = averager(rnd, o.by_examples), [], []
        G = mean([gradient.full(x, samples) for samples in rnd.samples])  # l.17, 21
        for c, i in enumerate(rnd.cohort):
            fresh = {"m": np.full_like(x0, o.m_init)}
            kept = {"carry": own.get(i, fresh), "restart": fresh}.get(o.momentum, {"m": m_server})  # A5
            y, m = x.copy(), kept["m"]
            for batch in batches(rnd, c):
                g = gradient(y, batch)
                if o.control_variate:  # A14
                    g = g - gradient(x, batch) + G
                g = g + l2(o, y)
                new_m = o.beta1 * m + (1 - o.beta1) * g  # l.10
                if o.momentum != "server":  # the server's statistic is frozen during local steps
                    m = new_m
                psi = new_m / (np.sqrt(v_hat) + o.eps)  # l.12
                y = y - rnd.lr * (scale(o, y, psi) + decoupled(o, y))  # l.13
            own[i] = {"m": m}
            deltas.append(y - x)
            m_up.append(m)
        x = x + o.server_lr * mean(deltas)  # l.19
        if r % o.sync_every == 0:
            v = o.beta2 * v + (1 - o.beta2) * G**2  # l.22
            v_hat = np.maximum(v_hat, v) if o.amsgrad else v  # l.23
            if o.momentum == "server":
                m_server = o.beta1 * m_server + (1 - o.beta1) * G
        if o.momentum == "average":
            m_server = mean(m_up)
        server = {"x": x, "v": v, "v_hat": v_hat} | ({"m": m_server} if o.momentum in ("average", "server") else {})
        names = ["m"] * (o.momentum == "carry")
        yield Record(server, {i: {n: kept[n] for n in names} for i, kept in own.items()}, deltas)


ALL = {
    f.__name__: f
    for f in (
        fedavg,
        fedprox,
        scaffold,
        fedcm,
        fedadam,
        fedadam_star,
        localadam,
        fedlada,
        fedlada_lamb,
        fedams,
        fedlamb,
        mime,
        mimelamb,
    )
}
