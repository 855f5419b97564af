"""Differential privacy in a run: what is clipped, what noise the mean gets, what is refused, and what is spent."""

import base64
import math

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from codec_cases import METHODS
from lamina.algorithms.contract import Displacement
from lamina.algorithms.scaffold import Up
from lamina.base.errors import BadInput
from lamina.channel.privacy import Noise, Privacy
from lamina.privacy.accounting import Accountant
from lamina.privacy.correlated import next_noise, square_root
from private_runs import X, Y, network, private_runs


@pytest.fixture
def run_of(tmp_path):
    make = private_runs(tmp_path)
    return lambda algorithm="fedavg", engine="loop", **more: make(algorithm, engine, **{"test": (X, Y), **more})


def seen_uploads(monkeypatch):
    """Keeps every upload after clipping."""
    seen, original = [], Privacy.clip

    def clip(self, up):
        clipped = original(self, up)
        seen.append((up, clipped))
        return clipped

    monkeypatch.setattr(Privacy, "clip", clip)
    return seen


@pytest.mark.parametrize(
    "more", [{}, {"sampling": "bernoulli"}, {"channel": {"codec": "sign", "feedback": True}}], ids=str
)
@pytest.mark.parametrize("algorithm", METHODS)
def test_the_stacked_engine_agrees_with_the_loop(run_of, algorithm, more):
    how = {"privacy": {"secret_cohorts": "sampling" in more}}  # exact and secret: not for clients with state
    one, other = (run_of(algorithm, engine, **more, **how) for engine in ("loop", "stacked"))
    for run in (one, other):
        run.run(3)
    torch.testing.assert_close(one.state.server.x, other.state.server.x, rtol=1e-9, atol=1e-11)


def test_members_of_a_population_have_noise_of_their_own(run_of, tmp_path):
    (tmp_path / "secret").write_bytes(b"s" * 32)
    shared = {"secret": str(tmp_path / "secret")}
    together = [run_of("fedlada", "stacked", seed=i, privacy=shared) for i in range(3)]
    alone = [run_of("fedlada", "stacked", seed=i) for i in range(3)]
    lamina.Population(together).run(2)
    for one, other in zip(together, alone, strict=True):
        other.run(2)
        torch.testing.assert_close(one.state.server.x, other.state.server.x, rtol=1e-9, atol=1e-11)
    noises = [one.protocol.privacy.noise.of_round("delta", 1, X[0]) for one in together]
    assert not torch.equal(noises[0], noises[1])


@pytest.mark.parametrize("sampling", ["exact", "bernoulli"])
def test_the_mean_is_of_clipped_uploads_and_its_noise_as_accounted(run_of, monkeypatch, sampling):
    """The sum is divided by the expected cohort, not the real one; over 3,000 numbers the noise shows its deviation."""
    seen = seen_uploads(monkeypatch)
    run = run_of(model=network(400), sampling=sampling, participation=0.3, lr=2.0)
    for number in range(1, 4):
        seen.clear()
        before = run.state.server.x.clone()
        run.run(1)
        cohort = len(run.plan.cohort(number))
        assert len(seen) == cohort
        norms = [float(clipped.delta.norm()) for _, clipped in seen]
        assert max(norms) <= 0.5
        assert max(float(up.delta.norm()) for up, _ in seen) > 0.5
        total = sum(clipped.delta for _, clipped in seen)
        noise = run.state.server.x - before - total / 12
        deviation = 2.0 * 0.5 / 12
        n = len(noise)
        assert float(noise.std()) == pytest.approx(deviation, rel=4 / math.sqrt(2 * n))
        assert abs(float(noise.mean())) < 4 * deviation / math.sqrt(n)
    if sampling == "bernoulli":
        assert any(len(run.plan.cohort(number)) != 12 for number in range(1, 4))


def test_short_uploads_are_left_alone_and_long_ones_keep_their_direction():
    up = Displacement(torch.tensor([[0.3, 0.4], [3.0, 4.0]], dtype=torch.float64))
    clipped = Privacy(1.0, 1e-3, 1.0).clip(up).delta
    assert torch.equal(clipped[0], up.delta[0])
    torch.testing.assert_close(clipped[1], torch.tensor([0.6, 0.8], dtype=torch.float64), rtol=1e-5, atol=0)
    assert float(clipped[1].norm()) <= 1.0


def test_one_bound_for_the_whole_upload_or_one_for_each_field():
    up = Up(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))
    joint = Privacy(1.0, 1e-3, 1.0).clip(up)
    torch.testing.assert_close(torch.cat([*joint]), torch.tensor([0.6, 0.0, 0.0, 0.8]), rtol=1e-5, atol=0)
    each = Privacy({"delta": 1.0, "delta_c": 8.0}, 1e-3, 1.0).clip(up)
    torch.testing.assert_close(torch.cat([*each]), torch.tensor([1.0, 0.0, 0.0, 4.0]), rtol=1e-5, atol=0)


def test_several_bounds_cost_as_much_as_one():
    """Each of two fields has √2 times the noise of its bound: together they are one mechanism with the multiplier z."""
    algorithm, noise = lamina.algorithms.create("scaffold"), Noise(b"key", 0.1)
    up = Up(torch.zeros(20_000), torch.zeros(20_000))
    privacy = Privacy({"delta": 2.0, "delta_c": 5.0}, 1e-3, 1.0, noise=noise)
    noised = privacy.private_mean(algorithm, up, 1, 1.0)
    assert float(noised.delta.std()) == pytest.approx(0.1 * 2 * math.sqrt(2), rel=0.03)
    assert float(noised.delta_c.std()) == pytest.approx(0.1 * 5 * math.sqrt(2), rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack([noised.delta, noised.delta_c]))[0, 1])) < 0.03


def test_second_moments_stay_non_negative(run_of):
    run = run_of("fedlamb", sampling="bernoulli", privacy={"noise_multiplier": 50.0})
    run.run(2)
    assert (run.state.server.v_hat >= 0).all()


def test_correlated_noise_follows_the_recurrence_also_after_a_restart():
    like, coefficients = torch.zeros(5), square_root(3)
    white, correlated = Noise(b"k", 1.0), Noise(b"k", 1.0, coefficients)
    earlier, expected = [], []
    for number in range(1, 8):
        noise = next_noise(white.of_round("delta", number, like), earlier, coefficients)
        earlier = [noise, *earlier][:2]
        expected.append(noise)
        torch.testing.assert_close(correlated.of_round("delta", number, like), noise)
    torch.testing.assert_close(Noise(b"k", 1.0, coefficients).of_round("delta", 7, like), expected[-1])
    assert not torch.equal(white.of_round("v", 1, like), white.of_round("delta", 1, like))


def test_the_budget_stops_the_run_and_every_row_says_what_is_spent(run_of):
    run = run_of(privacy={"noise_multiplier": None, "epsilon": 4.0, "rounds": 5})
    history = run.run(20)
    assert len(history) == 5
    accountant = Accountant(run.protocol.privacy.noise_multiplier, 1e-3, 40, participation=0.25)
    assert history.column("epsilon") == pytest.approx([accountant.epsilon(r) for r in range(1, 6)])
    assert 3.9 < history[-1]["epsilon"] <= 4.0
    assert history[-1]["accuracy"] > 0


PUBLIC_COLUMNS = {
    "round", "lr", "clients", "update_norm", "bytes_down", "bytes_up", "paper_bytes", "loss", "accuracy",
    "evaluation_seconds", "epsilon",
}  # fmt: skip


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("sampling", ["exact", "bernoulli"])
def test_rows_do_not_tell_who_takes_part_in_a_secret_cohort(run_of, sampling, engine):
    """The rows of two seeds differ in what the noise has touched alone, also with a field that is sent now and then."""
    algorithm = "fedlada" if sampling == "exact" else lamina.create("fedlamb", sync_every=2)  # which keeps state
    touched = {"update_norm", "loss", "accuracy"}
    runs = [run_of(algorithm, engine, sampling=sampling, seed=seed) for seed in (0, 1)]
    kept = [
        [{k: v for k, v in row.items() if k not in touched | {"evaluation_seconds"}} for row in run.run(4)]
        for run in runs
    ]
    assert kept[0] == kept[1]
    assert {*runs[0].history.columns} == PUBLIC_COLUMNS
    cohorts = [[tuple(run.plan.cohort(number)) for number in range(1, 5)] for run in runs]
    assert cohorts[0] != cohorts[1]
    assert (len({len(cohort) for cohort in cohorts[0]}) > 1) == (sampling == "bernoulli")
    assert {run.plan.round(number).participation for run in runs for number in range(1, 5)} == {0.25}


def test_rows_of_public_cohorts_tell_bytes_and_seconds_but_nothing_of_uploads(run_of):
    runs = [run_of(privacy={"secret_cohorts": False}), run_of(participation=1.0)]  # in the second one, all take part
    for run in runs:
        assert {*run.run(1).columns} == PUBLIC_COLUMNS | {"seconds"}


@pytest.mark.parametrize("together", [False, True])
def test_a_run_that_diverges_does_not_name_the_client(run_of, together):
    run = run_of(engine="stacked", lr=1e308, model=nn.Linear(5, 2).double())
    if together:
        population = lamina.Population([run])
        population.run(1)
        error = population.diverged[0]
    else:
        with pytest.raises(lamina.Diverged) as raised:
            run.run(1)
        error = raised.value
    assert (error.client, error.layer) == (None, "")
    assert str(error).startswith("round 1: training went non-finite; lower the learning rate")


@pytest.mark.parametrize("sampling", ["exact", "bernoulli"])
def test_the_time_of_a_secret_cohort_stays_secret(run_of, sampling):
    clock = {"step_seconds": {"median": 1.0, "sigma": 1.0}}
    assert "clock_seconds" not in run_of(sampling=sampling, clock=clock).run(2).columns
    known = run_of(sampling=sampling, clock=clock, privacy={"secret_cohorts": False})
    assert len(set(known.run(2).column("clock_seconds"))) == 2


def test_a_round_whose_coins_choose_nobody_is_noise_alone(run_of, monkeypatch):
    seen = seen_uploads(monkeypatch)
    run = run_of(sampling="bernoulli", participation=0.02, privacy={"noise_multiplier": 1e-3})
    empty = [number for number in range(1, 10) if run.plan.chooses_nobody(number)]
    assert 0 < len(empty) < 9
    for number in range(1, 10):
        seen.clear()
        before = run.state.server.x.clone()
        run.run(1)
        total = sum(clipped.delta for _, clipped in seen) * (number not in empty)
        torch.testing.assert_close(run.state.server.x, before + total / 0.8, rtol=0, atol=5 * 1e-3 * 0.5 / 0.8)


def test_a_resumed_run_draws_the_same_noise_and_another_run_other_noise(run_of, tmp_path):
    shared = {"secret": str(tmp_path / "secret")}
    whole = run_of("scaffold", out=tmp_path / "whole", sampling="bernoulli", privacy=shared)
    whole.run(4)
    for rounds in (2, 4):
        part = run_of("scaffold", out=tmp_path / "part", sampling="bernoulli", privacy=shared)
        part.run(rounds)
    assert torch.equal(part.state.server.x, whole.state.server.x)
    assert run_of(lr=0.2).protocol.privacy.noise.key != run_of(lr=0.3).protocol.privacy.noise.key
    secret, key = (tmp_path / "secret").read_bytes(), part.protocol.privacy.noise.key
    files = {path: path.read_bytes() for path in (tmp_path / "part").rglob("*") if path.is_file()}
    assert len(files) > 5
    for path, content in files.items():
        for each in (secret, key, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret)):
            assert each not in content, path
    (tmp_path / "secret").unlink()
    with pytest.raises(BadInput, match="drawn from another secret"):
        run_of("scaffold", out=tmp_path / "part", sampling="bernoulli", privacy=shared).run(6)


def test_the_same_as_the_definition_with_several_bounds_and_steps(run_of):
    """A round of FedAvg in numpy, with the noise taken from its definition."""
    privacy = Privacy(0.5, 1e-3, 2.0, noise=Noise(b"fixed", 0.1))
    model = nn.Linear(5, 2, bias=False).double()
    run = lamina.Simulation(
        model, (X, Y), "fedavg", clients=40, participation=0.25, local_steps=2, batch_size=None, lr=1.0,
        privacy=privacy, device="cpu",
    )  # fmt: skip
    x, data, labels = model.weight.detach().numpy().copy(), X.numpy(), Y.numpy()
    for number in (1, 2):
        plan, total = run.plan.round(number), np.zeros_like(x)
        for rows in plan.samples:
            local = x.copy()
            for _ in range(2):
                logits = data[rows] @ local.T
                p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
                p[np.arange(len(rows)), labels[rows]] -= 1
                local -= p.T @ data[rows] / len(rows)
            delta = local - x
            total += delta * min(1.0, 0.5 / np.linalg.norm(delta))
        white = Noise(b"fixed", 1.0).of_round("delta", number, torch.zeros(10)).numpy().reshape(2, 5)
        x = x + total / 10 + 0.1 * 0.5 * white
        run.run(1)
        np.testing.assert_allclose(run.state.server.x.numpy().reshape(2, 5), x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weighting": "examples"}, "weight by"),
        ({"aggregation": "median"}, "a robust mean moves by more"),
        ({"local_steps": None}, "give local_steps in place of epochs"),
        ({"client_metrics": True}, "client_metrics publishes figures of single clients"),
        ({"local_test": 0.2}, "local_test publishes"),
        ({"trust_ratios": True}, "trust_ratios publishes"),
        ({"clock": {"name": "4g", "over_select": 1.5}}, "leave deadline and over_select out"),
        ({"partition": {"name": "reallocate"}}, "dealt anew in every round"),
        ({"model": nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()}, "use GroupNorm"),
        ({"algorithm": lamina.algorithms.create("mime", "mime")}, "with a control variate publishes the mean gradient"),
        ({"algorithm": "scaffold"}, "protect clients that keep SCAFFOLD (option II)'s state"),
        ({"algorithm": "fedlamb"}, 'give sampling = "bernoulli" without a cohort_cap'),
        ({"algorithm": "fedlamb", "sampling": "bernoulli", "cohort_cap": 30}, "secret_cohorts = False (a larger ε)"),
        ({"channel": {"codec": "sign", "feedback": True}}, "clients that keep the rests of error feedback"),
        ({"private": ["2.*"]}, "clients that keep private parts of the model"),
        ({"privacy": {"bound": {"delta": 1.0}}, "algorithm": "scaffold"}, "bound of the field 'delta_c' is missing"),
        ({"privacy": {"bound": {"delta": 1.0, "w": 1.0}}}, "an upload of fedavg has no field 'w' (its fields: delta)"),
        ({"privacy": {"bound": {"delta": 1.0, 1: 1.0}}}, "an upload of fedavg has no field '1'"),
        ({"privacy": {"bound": {}}}, "privacy: bound = {}: give a number above 0, or a table with one for every"),
        ({"privacy": {"bound": True}}, "privacy: bound = True: give a number above 0"),
        ({"privacy": {"bound": 0.0}}, "privacy: bound = 0"),
        ({"privacy": {"secret": ""}}, "privacy: secret = '' is not the name of a file"),
        ({"privacy": {1: 2}}, "privacy has no option '1'"),
        ({"privacy": {"delta": 0.5}}, "promises nothing"),
        ({"privacy": {"noise_multiplier": None}}, "without 'epsilon' the noise is not known"),
        ({"privacy": {"noise_multiplier": None, "epsilon": 1.0}}, "without 'rounds' the noise is not known"),
        ({"privacy": {"noise_multiplier": None, "epsilon": 1e-9, "rounds": 10, "delta": 1e-9}}, "cannot be reached"),
        ({"privacy": {"epsilon": 0.5}}, "epsilon = 0.5 allows no round, for with noise_multiplier = 2 the first one"),
        ({"privacy": {"sigma": 1.0}}, "privacy has no option 'sigma'; did you mean 'noise_multiplier'"),
        ({"privacy": {"clip": 1.0}}, "privacy has no option 'clip'; did you mean 'bound'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_breaks_the_guarantee_is_refused_in_one_line(run_of, changed, message):
    with pytest.raises(BadInput) as error:
        run_of(**changed)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kept", [{"algorithm": "scaffold"}, {"private": ["2.*"]}], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"sampling": "bernoulli"},
        {"sampling": "bernoulli", "cohort_cap": 40},
        {"privacy": {"secret_cohorts": False}},
        {"participation": 1.0},
    ],
    ids=str,
)
def test_clients_that_keep_state_are_protected_where_sampling_does_not_count_on_it(run_of, kept, how):
    assert run_of(**kept, **how).run(1)[-1]["epsilon"] > 0


def test_noise_that_a_thread_draws_ahead_is_the_same():
    like, names = torch.zeros(7), ("delta", "v")
    ahead, alone = Noise(b"key", 1.0), Noise(b"key", 1.0)
    for name in names:
        ahead._draw_ahead(name, 2, like)
        ahead._draw_ahead(name, 3, like)  # the last one counts
    for number in (2, 3):
        for name in names:
            assert torch.equal(ahead.of_round(name, number, like), alone.of_round(name, number, like))
    assert not ahead._ahead


def test_noise_does_not_show_its_key():
    assert "fixed" not in repr(Noise(b"fixed", 0.1))
