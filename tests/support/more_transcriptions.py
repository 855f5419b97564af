"""More newer methods' pseudo-code in numpy float64: other averages, matrices, step sizes that tune themselves.

Like `newer_transcriptions.py`, this was written from the cards of the methods and their register of ambiguities only.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace as Options
from typing import Any

import numpy as np

from transcriptions import SHAPES, TENSORS, Array, Gradient, Record, averager, batches

# --- averages other than the mean displacement --------------------------------------------------------------------


def fednova(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Wang et al.: displacements divided by the weight a_i of a client's gradients in them, times the mean weight.

    The weights are recursions over the local steps, as in the authors' code, not the paper's closed forms.
    """
    x = x0.copy()
    for rnd in rounds:
        mean, deltas, directions, weights = averager(rnd, o.by_examples), [], [], []
        for c in range(len(rnd.cohort)):
            y, buffer = x.copy(), np.zeros_like(x)
            of_step = a = 0.0
            for batch in batches(rnd, c):
                buffer = o.momentum * buffer + gradient(y, batch) + o.decay * y
                y = y - rnd.lr * (buffer + o.mu * (y - x))
                of_step = o.momentum * of_step + 1
                a = (1 - rnd.lr * o.mu) * a + of_step
            deltas.append(y - x)
            directions.append((y - x) / a)
            weights.append(a)
        tau = mean(list(rnd.steps)) if o.mu > 0 else mean(weights)
        x = x + o.server_lr * tau * mean(directions)
        yield Record({"x": x}, deltas=deltas)


def fedexp(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Jhunjhunwala et al.: the server's rate is half the ratio of mean ||delta||^2 and ||D||^2, at least 1 (C27)."""
    x, eps = x0.copy(), o.eps
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c in range(len(rnd.cohort)):
            y = x.copy()
            for batch in batches(rnd, c):
                y = y - rnd.lr * (gradient(y, batch) + o.decay * y)
            deltas.append(y - x)
        D, eps = mean(deltas), eps * o.eps_decay  # also in round 1, as in the authors' code
        server_lr = max(1.0, mean([(delta**2).sum() for delta in deltas]) / (2 * ((D**2).sum() + eps)))
        previous, x = x, x + server_lr * D
        yield Record({"x": x, "previous": previous}, deltas=deltas)


# --- Muon clients -------------------------------------------------------------------------------------------------


def newton_schulz(U: Array, steps: int = 5) -> Array:
    """Return U with singular values near 1: five steps of a quintic iteration on the smaller Gram matrix."""
    if U.shape[-2] > U.shape[-1]:
        return np.swapaxes(newton_schulz(np.swapaxes(U, -1, -2), steps), -1, -2)
    X = U / (np.sqrt((U**2).sum(axis=(-2, -1), keepdims=True)) + 1e-7)
    for _ in range(steps):
        B = X @ np.swapaxes(X, -1, -2)
        X = 3.4445 * X + (-4.7750 * B + 2.0315 * (B @ B)) @ X
    return X


def muon_direction(U: Array, conv_scale: str = "one") -> Array:
    """Return sqrt(max(1, rows / cols)) NS5(U): kernels as [out, in kh kw], other arrays as (batches of) matrices.

    The authors take the rows and columns of one filter of a kernel, so that the factor is 1 for square filters (C9).
    """
    matrix = U.reshape(len(U), -1) if U.ndim == 4 else U
    rows, cols = matrix.shape[-2:] if U.ndim < 4 or conv_scale == "flattened" else (1, 1)
    return max(1.0, rows / cols) ** 0.5 * newton_schulz(matrix).reshape(U.shape)


def _muon_step(
    o: Options, y: Array, g: Array, M: Array, m: Array, v: Array, k: int
) -> tuple[Array, Array, Array, Array]:
    """Return the direction with decay, and the new moments: M of matrices, m and v of all other tensors."""
    matrices = np.zeros(len(SHAPES), dtype=bool)
    for i, shape in enumerate(SHAPES.values()):
        matrices[i] = len(shape) > 1
    if o.muon_on == "hidden":  # C10: not the first and the last matrix
        matrices[np.flatnonzero(matrices)[[0, -1]]] = False
    M, m, v, direction = M.copy(), m.copy(), v.copy(), np.zeros_like(y)
    for part, shape, is_matrix in zip(TENSORS, SHAPES.values(), matrices, strict=True):
        if is_matrix:
            M[part] = o.beta * M[part] + (1 - o.beta) * g[part]
            U = (1 - o.beta) * g[part] + o.beta * M[part] if o.nesterov else M[part]  # C8
            orthogonal = muon_direction(U.reshape(shape), o.conv_scale).ravel()
            direction[part] = o.muon_scale * (orthogonal + o.decay * y[part])  # C11
        else:
            m[part] = o.beta1 * m[part] + (1 - o.beta1) * g[part]
            v[part] = o.beta2 * v[part] + (1 - o.beta2) * g[part] ** 2
            m_hat, v_hat = m[part] / (1 - o.beta1**k), v[part] / (1 - o.beta2**k)
            direction[part] = m_hat / (np.sqrt(v_hat) + o.eps) + o.decay * y[part]
    return direction, M, m, v


def fedmuon(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Muon from the mean momentum for matrices, AdamW from zero for the rest (C14), plus the last round's direction."""
    x, M_server, g_a = x0.copy(), np.zeros_like(x0), np.zeros_like(x0)  # C13
    for rnd in rounds:
        mean, deltas, M_up = averager(rnd, o.by_examples), [], []
        for c in range(len(rnd.cohort)):
            y, M, m, v = x.copy(), M_server, np.zeros_like(x), np.zeros_like(x)
            for k, batch in enumerate(batches(rnd, c), 1):
                direction, M, m, v = _muon_step(o, y, gradient(y, batch), M, m, v, k)
                y = y - rnd.lr * ((1 - o.alpha) * direction + o.alpha * g_a)
            deltas.append(y - x)
            M_up.append(M)
        x, M_server = x + o.server_lr * mean(deltas), mean(M_up)
        g_a = -mean(deltas) / (rnd.lr * mean(list(rnd.steps)))
        yield Record({"x": x, "m": M_server, "g_a": g_a}, deltas=deltas)


def localmuon(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Muon and AdamW on the clients, from zero moments in every round, then the mean."""
    x = x0.copy()
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c in range(len(rnd.cohort)):
            y, M, m, v = x.copy(), np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
            for k, batch in enumerate(batches(rnd, c), 1):
                direction, M, m, v = _muon_step(o, y, gradient(y, batch), M, m, v, k)
                y = y - rnd.lr * direction
            deltas.append(y - x)
        x = x + o.server_lr * mean(deltas)
        yield Record({"x": x}, deltas=deltas)


# --- step sizes that tune themselves ------------------------------------------------------------------------------


def _norm(v: Array) -> float:
    return float(np.sqrt((v**2).sum()))


def cross_entropy(gradient: Gradient, theta: Array, samples: Array) -> float:
    """Return the mean loss whose gradient `gradient` is."""
    w1, b1, w2, b2 = (theta[part].reshape(shape) for part, shape in zip(TENSORS, SHAPES.values(), strict=True))
    logits = np.tanh(gradient.inputs[samples] @ w1.T + b1) @ w2.T + b2
    largest = logits.max(axis=1)
    log_sum = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    return float((log_sum - logits[np.arange(len(samples)), gradient.labels[samples]]).mean())


def deltasgd(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Kim et al.: a step size grows slowly, below gamma / 2 over the local estimate of the smoothness."""
    x = x0.copy()

    def decayed(y: Array, batch: Array) -> Array:
        return gradient(y, batch) + o.decay * y  # C54

    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c in range(len(rnd.cohort)):
            y, eta, theta = x.copy(), rnd.lr, o.theta_init  # C49
            y_before, g_last = y, np.zeros_like(y)
            for k, batch in enumerate(batches(rnd, c)):
                g = decayed(y, batch)
                if k > 0:
                    g_before = decayed(y_before, batch) if o.gradients == "same_batch" else g_last  # C48
                    moved, changed = _norm(y - y_before), _norm(g - g_before)
                    new = np.sqrt(1 + o.delta * theta) * eta
                    if moved > 0 and changed > 0:  # C52
                        new = min(new, o.gamma * moved / (2 * changed)) + o.eps  # C51
                    eta, theta = new, new / eta
                y_before, g_last = y, g
                y = y - eta * g
            deltas.append(y - x)
        x = x + o.server_lr * mean(deltas)
        yield Record({"x": x}, deltas=deltas)


def fedsps(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Mukherjee et al.: local SGD by stochastic Polyak step sizes, at most gamma_b, the rate of the round (C56)."""
    x = x0.copy()
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c in range(len(rnd.cohort)):
            y = x.copy()
            for batch in batches(rnd, c):
                g = gradient(y, batch) + o.decay * y
                loss = cross_entropy(gradient, y, batch) + o.decay / 2 * (y**2).sum()  # C58
                bottom = o.c * (g**2).sum() + o.eps  # C57
                gamma = min(max(loss - o.lower_bound, 0.0) / bottom, rnd.lr) if bottom > 0 else 0.0
                y = y - gamma * g
            deltas.append(y - x)
        x = x + o.server_lr * mean(deltas)
        yield Record({"x": x}, deltas=deltas)


# --- control variates ---------------------------------------------------------------------------------------------


def scaffnew(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Mishchenko et al.: h_i moves when the client sees where the average of its last round went."""
    x, p, h, ends, rates = x0.copy(), o.p, {}, {}, {}
    for rnd in rounds:
        mean, deltas = averager(rnd, o.by_examples), []
        for c, i in enumerate(rnd.cohort):
            h_i = h.get(i, np.zeros_like(x))
            if i in ends:
                h_i = h_i + p / rates[i] * (x - ends[i])
            y = x.copy()
            for batch in batches(rnd, c):
                y = y - rnd.lr * (gradient(y, batch) + o.decay * y - h_i)  # C67
            h[i], ends[i], rates[i] = h_i, y, rnd.lr
            deltas.append(y - x)
        x = x + mean(deltas)  # C65
        p = o.p if o.p > 0 else 1 / mean(list(rnd.steps))  # C62: of all clients, in the next broadcast
        yield Record(
            {"x": x}, {i: {"h": h[i], "y": ends[i], "inverse_lr": np.array([1 / rates[i]])} for i in h}, deltas
        )


# --- a reading of another method ----------------------------------------------------------------------------------


def fedlalr(x0: Array, rounds: Any, gradient: Gradient, o: Options) -> Iterator[Record]:
    """Sun et al. 2023 (2309.09719): local AMSGrad without an epsilon in the root; model and moments are averaged."""
    x, m_server, v_hat_server = x0.copy(), np.zeros_like(x0), np.full_like(x0, o.eps**2)
    for rnd in rounds:
        mean, deltas, m_up, v_up = averager(rnd, o.by_examples), [], [], []
        for c in range(len(rnd.cohort)):
            y, m, v, v_hat = x.copy(), m_server, v_hat_server, v_hat_server
            for batch in batches(rnd, c):
                g = gradient(y, batch)
                m = o.beta1 * m + (1 - o.beta1) * g
                v = o.beta2 * v + (1 - o.beta2) * g**2
                v_hat = np.maximum(v_hat, v)
                y = y - rnd.lr * m / np.sqrt(v_hat)
            deltas.append(y - x)
            m_up.append(m)
            v_up.append(v_hat)
        x, m_server, v_hat_server = x + mean(deltas), mean(m_up), mean(v_up)
        yield Record({"x": x, "m": m_server, "v_hat": v_hat_server}, deltas=deltas)


ALL = {f.__name__: f for f in (fednova, fedexp, fedmuon, localmuon, deltasgd, fedsps, scaffnew)}
