"""Audits: right mechanisms stay below what is accounted for, wrong ones are found, and nothing of the run is touched.

The seeds are fixed, and the margins are many deviations wide: other seeds would fail less than once in 10,000 times.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.base.errors import BadInput
from lamina.channel.privacy import Noise, Privacy
from lamina.training import audit as auditing

X = torch.randn(400, 20, generator=torch.Generator().manual_seed(0))
Y = (X[:, :4]).argmax(1)
COHORT = 10
HOW = {
    "all": {},
    "exact": {"participation": 0.5},
    "bernoulli": {"participation": 0.5, "sampling": "bernoulli"},
    "capped": {"participation": 0.5, "sampling": "bernoulli", "cohort_cap": COHORT + 4},
    "quantile": {"privacy": {"quantile": 0.5, "bound_rate": 1.0, "count_noise": 1.5}},
    "known": {"participation": 0.25, "min_separation": 4, "privacy": {"bands": 4}},
}


@pytest.fixture
def run_of(tmp_path):
    """Makes a simulation of 20 clients with differential privacy."""

    def make(algorithm="fedavg", engine="auto", privacy=None, **changed):
        given = {"bound": 0.5, "noise_multiplier": 2.0, "delta": 1e-3, "secret": str(tmp_path / "secret")}
        settings = {"clients": 2 * COHORT, "local_steps": 1, "batch_size": 4, "lr": 0.05}
        with torch.random.fork_rng():
            torch.manual_seed(2)
            model = nn.Sequential(nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 4))
        return lamina.Simulation(
            model, (X, Y), algorithm, engine=engine, privacy={**given, **(privacy or {})}, **{**settings, **changed}
        )

    return make


def small_noise(monkeypatch):
    """Noise divided by the size of the cohort once too often."""
    original = Noise.of_round
    monkeypatch.setattr(Noise, "of_round", lambda self, *arguments: original(self, *arguments) / COHORT)


def clipped_mean(monkeypatch):
    """One clip of the mean in place of one of every client."""
    clip, original = Privacy.clip, Privacy.private_mean
    monkeypatch.setattr(Privacy, "clip", lambda self, up, *more: up)
    monkeypatch.setattr(
        Privacy, "private_mean", lambda self, algorithm, up, *more: original(self, algorithm, clip(self, up), *more)
    )


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "how"), [("fedlamb", "all"), *(("fedavg", how) for how in HOW)])
def test_the_right_mechanism_shows_less_than_is_accounted_for_but_not_nothing(run_of, algorithm, how):
    settings = HOW[how] | {"privacy": {"noise_multiplier": 1.0, **HOW[how].get("privacy", {})}}
    found = lamina.audit(run_of(algorithm, **settings), rounds=3, runs=50, seed=1)
    assert 0.2 * found.accounted < found.shown < found.accounted
    assert not found.proves_error
    assert found.accounted == run_of(algorithm, **settings).accountant.epsilon(3)


@pytest.mark.long
@pytest.mark.parametrize("how", ["all", "bernoulli", "quantile"])
@pytest.mark.parametrize("wrong", [small_noise, clipped_mean])
def test_wrong_mechanisms_are_found(run_of, monkeypatch, wrong, how):
    """The canaries are several times as visible as the account says; the margin is that of the noise, not of luck."""
    wrong(monkeypatch)
    found = lamina.audit(run_of(**HOW[how]), rounds=3, runs=30, seed=1)
    assert found.proves_error
    assert found.shown > 1.5 * found.accounted


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "fedlamb", "fedlada", "scaffold", "fedadam", "mimelamb", "fedlada_lamb"]
)
def test_canaries_are_as_visible_as_the_bound_permits(run_of, algorithm, monkeypatch):
    """Without noise a canary shows its part of the mean; other clients move all directions a little."""
    run = run_of(algorithm, privacy={"bound": 0.3})
    found, original = [], auditing._Canaries.seen
    monkeypatch.setattr(Noise, "of_round", lambda self, name, number, like: torch.zeros_like(like).double())
    monkeypatch.setattr(auditing._Canaries, "seen", lambda self, up: found.append(original(self, up)) or found[-1])
    lamina.audit(run, rounds=1, runs=10, seed=1)
    seen, is_present = 20 * np.array(found), (np.arange(10)[:, None] + np.arange(10)) % 2 == 0
    with_canary, without = seen[is_present], seen[~is_present]
    if run.algorithm.non_negative:  # a half of these fields is negative, and cut off
        assert with_canary.min() > 0.5
    else:
        assert with_canary.mean() - without.mean() == pytest.approx(1.0, abs=0.4)
        assert with_canary.min() > without.max()


def test_what_other_clients_send_is_not_taken_for_a_canary(run_of, monkeypatch):
    """They move every other direction up and the rest down, with and without its canary."""
    run, clip = run_of(clients=100), Privacy.clip
    directions = auditing._Canaries.of(run, run.protocol.privacy).directions["delta"]
    sent = (directions[::2] - directions[1::2]).sum(0) * 1e3

    def all_alike(self, up, *more):
        length = up.delta.norm(dim=-1, keepdim=True)
        is_canary = (length == 0) | (length > 10)
        return clip(self, up._replace(delta=torch.where(is_canary, up.delta, sent)), *more)

    monkeypatch.setattr(Privacy, "clip", all_alike)
    assert not lamina.audit(run, rounds=4, runs=20, seed=1).proves_error


@pytest.mark.long
def test_every_field_is_audited_at_its_own_bound(run_of):
    bounds = {"delta": 0.5, "delta_c": 0.01}
    joint = lamina.audit(run_of("scaffold"), rounds=3, runs=60, seed=1)
    each = lamina.audit(run_of("scaffold", privacy={"bound": bounds}), rounds=3, runs=60, seed=1)
    assert each.shown == pytest.approx(joint.shown, rel=0.25)


@pytest.mark.long
def test_noise_that_one_field_lacks_is_found(run_of, monkeypatch):
    original = Noise.of_round
    share = {"delta": 1.0, "delta_c": 0.0}
    monkeypatch.setattr(Noise, "of_round", lambda self, name, *more: share[name] * original(self, name, *more))
    assert lamina.audit(run_of("scaffold", privacy={"noise_multiplier": 1.5}), rounds=5, runs=100, seed=1).proves_error


def test_both_engines_see_the_same(run_of):
    one, other = (lamina.audit(run_of("fedlada", engine), runs=10, rounds=2, seed=4) for engine in ("stacked", "loop"))
    np.testing.assert_allclose(one.present, other.present, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(one.absent, other.absent, rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("how", ["all", "quantile"])
def test_scores_of_the_right_mechanism_are_those_of_the_gaussian_mechanism(run_of, how):
    """k rounds with all clients: the logarithm of the ratio is N(±k/2z², k/z²), and directions are independent.

    An adaptive bound changes canaries and noise alike, and the uploads' noise is larger than the account's.
    """
    run, rounds = run_of(**HOW[how]), 4
    noise = run.protocol.privacy.noise.deviation * 2 * COHORT
    assert noise == pytest.approx(2.0) if how == "all" else noise > 2.5
    found = lamina.audit(run, runs=200, rounds=rounds, seed=5)
    mean, deviation, n = rounds / 2 / noise**2, math.sqrt(rounds) / noise, len(found.present)
    assert n == 1000
    for scores, sign in ((found.present, 1), (found.absent, -1)):
        assert scores.mean() == pytest.approx(sign * mean, abs=5 * deviation / math.sqrt(n))
        assert scores.std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * n))
    pairs = np.corrcoef(found.present.reshape(200, 5).T)[np.triu_indices(5, 1)]
    assert abs(pairs.mean()) < 5 / math.sqrt(10 * 200)


def test_an_audit_leaves_the_simulation_as_it_is_and_draws_noise_of_its_own(run_of, monkeypatch):
    keys, original = set(), Noise.of_round
    monkeypatch.setattr(Noise, "of_round", lambda self, *arguments: keys.add(self.key) or original(self, *arguments))
    run, other = run_of(), run_of()
    first = lamina.audit(run, runs=10, rounds=1)
    assert run.protocol.privacy.noise.key not in keys
    assert len(keys) == 10
    assert run.state.round == 0
    assert not run.state.clients
    run.run(2)
    other.run(2)
    assert torch.equal(run.state.server.x, other.state.server.x)
    second = lamina.audit(run, runs=10, rounds=1)
    assert not np.array_equal(first.present, second.present)
    assert dataclasses.replace(first, present=0, absent=0).accounted == second.accounted


@pytest.mark.parametrize(
    ("changed", "arguments", "message"),
    [
        ({}, {"runs": 5}, "take at least 10"),
        ({}, {"runs": 0}, "runs"),
        ({}, {"rounds": 0}, "rounds"),
        ({}, {"seed": "x"}, "seed"),
        ({"private": ["2.*"]}, {}, "leave `private` out"),
        (
            {"privacy": {"epsilon": 4.0, "rounds": 5, "noise_multiplier": None}},
            {"rounds": 8},
            "exceed the privacy budget, which is spent after 5 rounds",
        ),
    ],
)
def test_impossible_audits_are_refused_in_one_line(run_of, changed, arguments, message):
    with pytest.raises(BadInput) as error:
        lamina.audit(run_of(**changed), **{"rounds": 2, **arguments})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_without_differential_privacy_has_nothing_to_audit():
    with pytest.raises(BadInput, match="no differential privacy"):
        lamina.audit(lamina.Simulation(nn.Linear(20, 4), (X, Y), "fedavg", clients=4), rounds=2)
