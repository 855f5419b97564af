"""Recorded trust ratios are those of steps that were taken, and means over clients use the run's own weights."""

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from small_simulations import take_gpu_path

X = np.random.default_rng(0).normal(size=(30, 4))
Y = np.arange(30) % 3
PARTS = [range(0, 5), range(5, 17), range(17, 30)]  # ragged: with batches of 4, K = 2, 3, 4
LR, DECAY = 0.05, 0.1


def model():
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    nn.init.zeros_(net.bias)  # its phi is the floor in the first step
    return net


def simulate(algorithm, **more):
    settings = {"clients": PARTS, "batch_size": 4, "lr": LR, "device": "cpu", "trust_ratios": True}
    return lamina.Simulation(model(), (X, Y), algorithm, **settings | more)


def gradient(weight, bias, samples):
    """Mean cross entropy of a linear model, and its gradient, with numpy alone."""
    logits = X[samples] @ weight.T + bias
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    chances = shifted / shifted.sum(1, keepdims=True)
    loss = -np.log(chances[np.arange(len(samples)), Y[samples]]).mean()
    chances[np.arange(len(samples)), Y[samples]] -= 1
    return [chances.T @ X[samples] / len(samples), chances.mean(0)], loss


def moments(name, round_v, state, g):
    """m, v and what m is divided by after one more gradient."""
    beta2 = 0.99 if name == "fedlada_lamb" else 0.999
    m, v, v_hat = 0.9 * state[0] + 0.1 * g, beta2 * state[1] + (1 - beta2) * g**2, state[2]
    return (m, v, np.maximum(v_hat, v) if name == "fedlada_lamb" else round_v)


def last_ratios(name, batches):
    """The ratio of each layer in the last of one client's steps, and its mean loss."""
    net = model()
    y = [net.weight.detach().numpy().copy(), net.bias.detach().numpy().copy()]
    start = 1e-16 if name == "fedlada_lamb" else 1e-6
    states = [(np.zeros_like(p), np.full_like(p, start), np.full_like(p, start)) for p in y]
    losses = []
    for batch in batches:
        grads, loss = gradient(*y, batch)
        losses.append(loss)
        ratios = []
        for i, g in enumerate(grads):
            states[i] = moments(name, np.full_like(y[i], start), states[i], g)
            u = states[i][0] / np.sqrt(states[i][2]) + DECAY * y[i]
            ratios.append(max(np.linalg.norm(y[i]), 1e-2) / np.linalg.norm(u))
            y[i] = y[i] - LR * (0.1 if name == "fedlada_lamb" else 1.0) * ratios[i] * u
    return np.array(ratios), np.mean(losses)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["loop", "stacked", "captured", "gpu path"])
@pytest.mark.parametrize("weighting", ["clients", "examples"])
@pytest.mark.parametrize("name", ["fedlamb", "mimelamb", "fedlada_lamb"])
def test_recorded_ratios_are_those_of_the_last_local_steps(name, weighting, engine):
    forced = "stacked" if engine == "gpu path" else engine
    run = simulate(lamina.create(name, decay=DECAY), weighting=weighting, engine=forced)
    if engine == "gpu path":
        take_gpu_path(run)
    plan = run.plan.round(1)
    alone = [last_ratios(name, [plan.batch(c, k) for k in range(plan.steps[c])]) for c in range(3)]
    weights = np.array([5, 12, 13]) / 30 if weighting == "examples" else np.full(3, 1 / 3)
    row = run.run(1)[0]
    expected = weights @ np.stack([ratios for ratios, _ in alone])
    assert [row["trust_ratio/weight"], row["trust_ratio/bias"]] == pytest.approx(expected, rel=1e-6)
    assert row["train_loss"] == pytest.approx(weights @ [loss for _, loss in alone], rel=1e-9)


@pytest.mark.parametrize("given", [{"layers": "module"}, {"zero_norm": "lamb"}, {"phi_max": 0.1}])
def test_ratios_agree_between_engines_over_rounds(given):
    loop, stacked = (
        simulate(lamina.FedLamb(**given), engine=engine, participation=0.7) for engine in ("loop", "stacked")
    )
    for one, other in zip(loop.run(3), stacked.run(3), strict=True):
        names = [name for name in one if name.startswith("trust_ratio/")]
        assert len(names) == (1 if "layers" in given else 2)
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-9)


@pytest.mark.parametrize("preset", ["mime", "mimelite"])
def test_ratios_with_the_servers_momentum_are_of_the_step_taken(preset):
    """The step from y_0 = x has u = (beta_1 m + (1 - beta_1) g) / sqrt(v_hat): a recomputed one would have u = 0."""
    algorithm = lamina.create("mimelamb", preset, zero_norm="literal")
    for engine in ("loop", "auto"):
        run = simulate(algorithm, clients=[range(30)], batch_size=30, engine=engine)
        g, _ = gradient(
            *(p.detach().numpy() for p in (run.objective.module.weight, run.objective.module.bias)), range(30)
        )
        row = run.run(1)[0]
        expected = np.linalg.norm(run.objective.start[:12].numpy()) / np.linalg.norm(0.1 * g[0] / np.sqrt(1e-6))
        assert row["trust_ratio/weight"] == pytest.approx(expected, rel=1e-6)
        assert row["trust_ratio/bias"] == 0


def test_recording_changes_no_weights():
    for engine in ("loop", "stacked"):
        runs = [simulate("fedlamb", engine=engine, trust_ratios=asked) for asked in (False, True)]
        for run in runs:
            run.run(3)
        assert torch.equal(*(run.state.server.x for run in runs))
        assert not any(name.startswith("trust_ratio") for name in runs[0].history.columns)


def test_an_unweighted_training_loss_is_the_mean_over_clients():
    run = simulate("fedavg", weighting="clients")
    plan = run.plan.round(1)
    first = [gradient(*(p.detach().numpy() for p in model().parameters()), plan.batch(c, 0))[1] for c in range(3)]
    single = simulate("fedavg", local_steps=1).run(1)[0]
    assert single["train_loss"] == pytest.approx(np.mean(first), rel=1e-9)
