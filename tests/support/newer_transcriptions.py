"""The pseudo-code of newer methods in numpy float64, written from their cards and register of ambiguities only.

Nothing here shares code with `lamina.algorithms`. `transcriptions.py` explains the interface

    name(x0, rounds, gradient, o)

and the symbols. Further ones: D = mean of all delta, t = local steps since round 1 (a mean over clients). The C numbers
are those of the register of ambiguities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace as Options
from typing import Any

import numpy as np

from transcriptions import (
    MODULES,
    TENSORS,
    Array,
    Gradient,
    Record,
    averager,
    batches,
    clipped,
    decoupled,
    l2,
    layerwise,
    rate_factor,
)

# --- SGD clients, another server ----------------------------------------------------------------------------------


def _sgd_deltas(o: Options, x: Array, rnd: Any, gradient: Gradient) -> list[Array]:
    """FedAvg's clients, with L2 decay."""
    deltas = []
    for c in range(len(rnd.cohort)):
        y = x.copy()
        for batch in batches(rnd, c):
            y = y - rnd.lr * (gradient(y, batch) + o.decay * y)
        deltas.append(y - x)
    return deltas


def fedavgm(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """FedAvg with heavy-ball momentum on the server: the sum of all D, the older ones weighted down by mu."""
    x, b = x0.copy(), np.zeros_like(x0)
    for rnd in rounds:
        deltas = _sgd_deltas(o, x, rnd, gradient)
        D = averager(rnd, o.by_examples)(deltas)
        b = o.mu * b + (1 - o.mu if o.damped else 1.0) * D  # C24
        x = x + o.server_lr * b
        yield Record({"x": x, "b": b}, deltas=deltas)


def _adaptive_server(
    x0: Array,
    rounds: Any,
    gradient: Gradient,
    o: Options,
    rule: Callable[[Array, Array], Array],
    *,
    v_hat_init: float | None = None,
    bias_correction: bool = False,
    factor: Callable[[Options, int], float] = lambda o, r: 1.0,
) -> Iterator[Record]:
    """Reddi et al.: `rule` gives v+ from v and D^2. Without `v_hat_init`, no running maximum."""
    x, m, v = x0.copy(), np.zeros_like(x0), np.full_like(x0, o.v_init)
    v_hat = None if v_hat_init is None else np.full_like(x0, v_hat_init)
    for r, rnd in enumerate(rounds, 1):
        deltas = _sgd_deltas(o, x, rnd, gradient)
        D = averager(rnd, o.by_examples)(deltas)
        m = o.beta1 * m + (1 - o.beta1) * D
        v = rule(v, D**2)
        if v_hat is not None:
            v_hat = np.maximum(v_hat, v)
        m_used, v_used = m, v if v_hat is None else v_hat
        if bias_correction:
            m_used, v_used = m_used / (1 - o.beta1**r), v_used / (1 - o.beta2**r)
        x = x + o.server_lr * factor(o, r) * m_used / (np.sqrt(v_used) + o.tau)
        yield Record({"x": x, "m": m, "v": v} | ({} if v_hat is None else {"v_hat": v_hat}), deltas=deltas)


def fedyogi(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """v moves towards D^2 by (1 - beta2) D^2, whatever the distance; not at all where v = D^2 (C26)."""
    return _adaptive_server(
        x0,
        rounds,
        gradient,
        o,
        lambda v, D2: v - (1 - o.beta2) * D2 * np.sign(v - D2),
        factor=rate_factor,
    )


def fedadagrad(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """v is the sum of all D^2."""
    return _adaptive_server(x0, rounds, gradient, o, lambda v, D2: v + D2)


def fedams_server(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Adam with the running maximum, which starts at its own value (C17). The copies are corrected after the max."""
    return _adaptive_server(
        x0,
        rounds,
        gradient,
        o,
        lambda v, D2: o.beta2 * v + (1 - o.beta2) * D2,
        v_hat_init=o.v_hat_init,
        bias_correction=o.bias_correction,
    )


def feddyn(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Acar et al., by K steps of SGD, with q_i = -h_i / alpha and q = -h / alpha."""
    x, q, own = x0.copy(), np.zeros_like(x0), {}
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c, i in enumerate(rnd.cohort):
            y, q_i = x.copy(), own.get(i, np.zeros_like(x0))
            for batch in batches(rnd, c):
                y = y - rnd.lr * (gradient(y, batch) + o.alpha * (y - x) + o.alpha * q_i + o.decay * y)
            own[i] = q_i + (y - x)
            deltas.append(y - x)
        q = q + rnd.participation * mean(deltas)  # |S| / N: absent clients stay in q
        x = x + mean(deltas) + q
        yield Record({"x": x, "q": q}, {i: {"q": q_i} for i, q_i in own.items()}, deltas)


# --- sign and AdamW clients ---------------------------------------------------------------------------------------


def fedlion(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Local Lion from the server's momentum; model and momentum are averaged."""
    x, m_server = x0.copy(), np.zeros_like(x0)
    for rnd in rounds:
        mean, deltas, m_up = averager(rnd, o.by_examples), [], []
        for c in range(len(rnd.cohort)):
            y, m = x.copy(), m_server
            for batch in batches(rnd, c):
                g = gradient(y, batch)
                direction = np.sign(o.beta1 * m + (1 - o.beta1) * g)
                m = o.beta2 * m + (1 - o.beta2) * g
                y = y - rnd.lr * (direction + o.decay * y)
            deltas.append(y - x)
            m_up.append(m)
        x, m_server = x + o.server_lr * mean(deltas), mean(m_up)
        yield Record({"x": x, "m": m_server}, deltas=deltas)


def diloco(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """AdamW on the clients, whose moments outlive the round; Nesterov momentum on the server."""
    x, b, own = x0.copy(), np.zeros_like(x0), {}
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c, i in enumerate(rnd.cohort):
            y, start = x.copy(), (np.zeros_like(x0), np.zeros_like(x0), 0)
            m, v, t = own.get(i, start) if o.inner_state == "keep" else start  # C39
            for batch in batches(rnd, c):
                t += 1
                g = gradient(y, batch)
                m = o.beta1 * m + (1 - o.beta1) * g
                v = o.beta2 * v + (1 - o.beta2) * g**2
                m_hat, v_hat = m / (1 - o.beta1**t), v / (1 - o.beta2**t)
                y = y - rnd.lr * (m_hat / (np.sqrt(v_hat) + o.eps) + o.decay * y)
            own[i] = m, v, t
            deltas.append(y - x)
        D = mean(deltas)
        b = o.mu * b + D
        x = x + o.server_lr * (D + o.mu * b)
        clients = {
            i: {"m": m, "v": v, "m_weight": np.array([1 - o.beta1**t]), "v_weight": np.array([1 - o.beta2**t])}
            for i, (m, v, t) in own.items()
        }
        yield Record({"x": x, "b": b}, clients if o.inner_state == "keep" else {}, deltas)


def localadamw(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """AdamW on the clients, from zero moments in every round, then the mean."""
    x = x0.copy()
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c in range(len(rnd.cohort)):
            y, m, v = x.copy(), np.zeros_like(x), np.zeros_like(x)
            for k, batch in enumerate(batches(rnd, c), 1):
                g = gradient(y, batch)
                m = o.beta1 * m + (1 - o.beta1) * g
                v = o.beta2 * v + (1 - o.beta2) * g**2
                m_hat, v_hat = m / (1 - o.beta1**k), v / (1 - o.beta2**k)
                y = y - rnd.lr * (m_hat / (np.sqrt(v_hat) + o.eps) + o.decay * y)
            deltas.append(y - x)
        x = x + o.server_lr * mean(deltas)
        yield Record({"x": x}, deltas=deltas)


def fedadamw(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """AdamW on the clients from the server's second moment, one number per block, plus the last round's direction."""
    blocks = {"tensor": TENSORS, "module": MODULES, "model": [slice(None)]}[o.layers]  # C1
    sends_v = o.v_sync != "none"

    def spread(v: Array) -> Array:
        if o.v_sync == "full":
            return v
        out = np.zeros_like(x0)
        for number, block in zip(v, blocks, strict=True):
            out[block] = number
        return out

    def shortened(v: Array) -> Array:
        return v if o.v_sync == "full" else np.array([v[block].mean() for block in blocks])

    x, g_a, t = x0.copy(), np.zeros_like(x0), 0.0
    v_server = shortened(np.zeros_like(x0))  # C5
    weight = 1 - o.alpha if o.local_weight == "complement" else 1.0  # C3
    for rnd in rounds:
        mean, deltas, v_up = averager(rnd, o.by_examples), [], []
        for c in range(len(rnd.cohort)):
            y, m = x.copy(), np.zeros_like(x)
            v = spread(v_server) if sends_v else np.zeros_like(x)
            for k, batch in enumerate(batches(rnd, c), 1):
                g = gradient(y, batch)
                m = o.beta1 * m + (1 - o.beta1) * g
                v = o.beta2 * v + (1 - o.beta2) * g**2
                m_hat = m / (1 - o.beta1 ** (t + k if o.m_correction == "global" else k))  # C4
                v_hat = v / (1 - o.beta2 ** (t + k if sends_v else k))
                adam = m_hat / (np.sqrt(v_hat) + o.eps)
                y = y - rnd.lr * (weight * adam + o.alpha * g_a + o.decay * y)  # C2: + decay
            deltas.append(y - x)
            v_up.append(shortened(v))
        K = mean(list(rnd.steps))
        x = x + o.server_lr * mean(deltas)
        g_a = -mean(deltas) / (rnd.lr * K)  # C6
        v_server, t = mean(v_up), t + K
        server = {"x": x, "g_a": g_a, "steps": np.array([t])} | ({"v": v_server} if sends_v else {})
        yield Record(server, deltas=deltas)


# --- clients that step with the gradient at a perturbed point -----------------------------------------------------


def _sharpness_aware(o: Options, y: Array, batch: Array, gradient: Gradient) -> Array:
    """The gradient of the same batch at distance rho up the slope; the decay has no part in the perturbation (C42)."""
    g = gradient(y, batch)
    return gradient(y + o.rho * g / (np.sqrt((g**2).sum()) + 1e-7), batch)


def fedsam(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """FedAvg with the gradient at the perturbed point; the decay is that at y (C41)."""
    x = x0.copy()
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c in range(len(rnd.cohort)):
            y = x.copy()
            for batch in batches(rnd, c):
                y = y - rnd.lr * (_sharpness_aware(o, y, batch, gradient) + o.decay * y)
            deltas.append(y - x)
        x = x + o.server_lr * mean(deltas)
        yield Record({"x": x}, deltas=deltas)


def mofedsam(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """FedCM with the gradient at the perturbed point."""
    x, momentum = x0.copy(), np.zeros_like(x0)
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c in range(len(rnd.cohort)):
            y = x.copy()
            for batch in batches(rnd, c):
                g = _sharpness_aware(o, y, batch, gradient) + l2(o, y)  # C41
                mix = o.alpha * g + (1 - o.alpha) * momentum
                y = y - rnd.lr * (clipped(mix, o.clip_direction) + decoupled(o, y))
            deltas.append(y - x)
        x = x + o.server_lr * mean(deltas)
        momentum = -mean(deltas) / (rnd.lr * mean(list(rnd.steps)))
        yield Record({"x": x, "momentum": momentum}, deltas=deltas)


# --- layer-wise steps ---------------------------------------------------------------------------------------------


def fedlars(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Local LARS ("lars": normalise, then average) or LAMB without a second moment ("lamb": average, then normalise).

    `layerwise` adds the decay of the form "ratio" to the vector that it normalises.
    """
    x, own = x0.copy(), {}
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c, i in enumerate(rnd.cohort):
            y, zero = x.copy(), np.zeros_like(x0)
            m = own.get(i, zero) if o.momentum == "keep" else zero
            for batch in batches(rnd, c):
                g = gradient(y, batch) + l2(o, y)
                if o.order == "lars":
                    m = o.beta1 * m + (1 - o.beta1) * layerwise(o, y, g)  # C45, C46
                    direction = m
                else:
                    m = o.beta1 * m + (1 - o.beta1) * g
                    direction = layerwise(o, y, m)
                y = y - rnd.lr * (direction + decoupled(o, y))
            own[i] = m
            deltas.append(y - x)
        x = x + o.server_lr * mean(deltas)
        yield Record({"x": x}, {i: {"m": m} for i, m in own.items()} if o.momentum == "keep" else {}, deltas)


ALL = {
    f.__name__: f
    for f in (
        fedavgm,
        fedyogi,
        fedadagrad,
        fedams_server,
        feddyn,
        fedlion,
        diloco,
        localadamw,
        fedadamw,
        fedsam,
        mofedsam,
        fedlars,
    )
}
