"""A small federated problem on which the library is compared with the transcriptions of the papers.

Five clients hold 7, 12, 3, 9 and 5 samples. With batches of 4 they take K = 2, 3, 1, 3, 2 local steps in an epoch, and
three of them are active in a round. Only the round plan is shared between the library and the transcriptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import lamina
import more_transcriptions
import newer_transcriptions
import transcriptions as T  # noqa: N812
from lamina import algorithms
from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.algorithms.declaration import options

TRANSCRIPTIONS = T.ALL | newer_transcriptions.ALL | more_transcriptions.ALL
NAMES = tuple(TRANSCRIPTIONS)
SIZES = (7, 12, 3, 9, 5)
CLIENTS = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
INPUTS = np.random.default_rng(7).normal(size=(sum(SIZES), T.INPUTS))
LABELS = np.random.default_rng(8).integers(0, T.CLASSES, sum(SIZES))
TRAIN = (torch.from_numpy(INPUTS), torch.from_numpy(LABELS))
START = T.start_vector()
LAYERS = lamina.Layers(T.SHAPES)
LR = dict.fromkeys(("fedams", "mime"), 5e-4) | dict.fromkeys(("localadam", "fedlada"), 0.01)
LR |= dict.fromkeys(("fedlamb", "mimelamb", "fedlada_lamb", "fedlars"), 0.03)
LR |= dict.fromkeys(("localadamw", "fedadamw", "diloco", "fedlion"), 0.01)
LR |= dict.fromkeys(("localmuon", "fedmuon"), 0.03) | {"deltasgd": 0.2, "fedsps": 1.0}
BYTES = T.SIZE * 8  # of one float64 vector

DECAYS: list[dict[str, Any]] = [{"decay": 0.2, "decay_form": form} for form in ("l2", "decoupled")]
LADA: list[dict[str, Any]] = [{"v_seed": "zero"}, {"v_init": 1e-4, "beta1": 0.5, "beta2": 0.7, "server_lr": 0.6}]


def make(name: str, given: dict[str, Any] | None = None) -> Any:
    """Make an algorithm from options, which may name a preset."""
    given = dict(given or {})
    return algorithms.create(name, preset=given.pop("preset", None), **given)


def simulate(algorithm: Any, engine: Any = "loop", **settings: Any) -> lamina.Simulation:
    """Return a simulation of the problem, by default on the reference engine."""
    settings = {
        "clients": CLIENTS,
        "participation": 0.6,
        "batch_size": 4,
        "lr": LR.get(algorithm.card.name, 0.1),
        "schedule": lamina.schedules.Exponential(0.9),
        "seed": 3,
        "device": "cpu",
    } | settings
    return lamina.Simulation(T.Network(START), TRAIN, algorithm, engine=engine, **settings)


def transcribe(simulation: lamina.Simulation, rounds: int, override: dict[str, Any] | None = None) -> Any:
    """Yield the transcription's records over the simulation's plan."""
    algorithm, protocol = simulation.algorithm, simulation.protocol
    chosen = {n: getattr(algorithm, n) for n in options(type(algorithm))} | (override or {})
    chosen["by_examples"] = protocol.weighting == "examples"
    clips_gradient = chosen.get("clip_direction", np.inf) == np.inf
    gradient = T.Gradient(INPUTS, LABELS, (protocol.clip if clips_gradient else None) or np.inf)
    plans = [simulation.plan.round(r) for r in range(1, rounds + 1)]
    return TRANSCRIPTIONS[algorithm.card.name](START, plans, gradient, SimpleNamespace(**chosen))


_TRAJECTORIES: dict[str, np.ndarray] = {}


def trajectory(name: str, given: dict[str, Any] | None = None, rounds: int = 3, **settings: Any) -> np.ndarray:
    """Return x after every round, from the library: [rounds, p]. Tests share the ones that are equal."""
    key = repr((name, given, rounds, settings))
    if key not in _TRAJECTORIES:
        simulation, path = simulate(make(name, given), **settings), []
        for _ in range(rounds):
            simulation.run(1)
            path.append(simulation.state.server.x.numpy().copy())
        _TRAJECTORIES[key] = np.stack(path)
    return _TRAJECTORIES[key]


def close(actual: Any, expected: Any, what: str = "", rtol: float = 1e-10) -> None:
    """Assert equality up to rounding, relative to the largest entry."""
    actual, expected = np.asarray(actual, dtype=float), np.asarray(expected, dtype=float)
    atol = rtol * np.abs(expected).max() if expected.size else 0.0
    np.testing.assert_allclose(actual, np.broadcast_to(expected, actual.shape), rtol=rtol, atol=atol, err_msg=what)


def differ(a: Any, b: Any, least: float = 1e-7) -> bool:
    """Return whether two arrays differ by far more than rounding."""
    a, b = np.asarray(a), np.asarray(b)
    return bool(np.abs(a - b).max() > least * np.abs(b).max())


# --- one round by the seven functions, with given gradients --------------------------------------------------------

Infos = tuple[ServerInfo, ClientInfo]


def infos(r: int, lr: Any, steps: Any = 1.0, gradient: Any = None) -> Infos:
    """Return what the server and a client know about a round in which all clients take the same steps."""
    return ServerInfo(r, lr, LAYERS, 1.0, steps, gradient), ClientInfo(r, lr, LAYERS, steps, gradient)


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random vectors [*shape, p]."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((*shape, T.SIZE)))


def local_run(algorithm: Any, server: Any, client: Any, grads: torch.Tensor, info: Infos) -> tuple[Any, Any, list[Any]]:
    """Run one client's round with gradients [K, p]; return its Up, its new state and all its local models."""
    down = algorithm.broadcast(server, info[0])
    local = algorithm.begin(down, client, info[1])
    path = [local.y]
    for g in grads:
        local = algorithm.step(local, down, g, info[1].lr, info[1].layers)
        path.append(local.y)
    up, client = algorithm.finish(local, down, client, info[1])
    return up, client, path


def first_path(algorithm: Any, x: torch.Tensor, grads: torch.Tensor, lr: float = 0.07) -> list[torch.Tensor]:
    """Return all local models of a new client in round 1."""
    info = infos(1, lr, len(grads), vectors(seed=5))
    return local_run(algorithm, algorithm.init(x, LAYERS), algorithm.client_init(x, LAYERS), grads, info)[2]


def federate(algorithm: Any, server: Any, grads: torch.Tensor, info: Infos) -> Any:
    """Return the server's state after a round of new clients with gradients [clients, K, p]."""
    client = algorithm.client_init(server.x, LAYERS)
    ups = [local_run(algorithm, server, client, g, info)[0] for g in grads]
    return algorithm.update(server, mean_of(ups), info[0])


def mean_of(ups: list[Any], weights: Sequence[float] | None = None) -> Any:
    """Return the mean of uploads, uniform without weights, and without the fields that are not sent."""
    w = torch.tensor(weights or [1.0] * len(ups), dtype=torch.float64)[:, None]
    means = [None if f[0] is None else (w * torch.stack(f)).sum(0) / w.sum() for f in zip(*ups, strict=True)]
    return type(ups[0])(*means)
