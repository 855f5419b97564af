"""What an upload owes to the broadcast alone: with zero gradients, an upload is exactly that."""

import pytest
import torch

import lamina
from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.objective.layers import Layers

STEPS, LR = 3, 0.1
X = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
LAYERS = Layers.of(torch.nn.Linear(5, 1))


def upload(algorithm, down, gradient=0.0, round=1):
    """Return what a new client sends after steps with a constant gradient, and the round's info."""
    info = ClientInfo(round, LR, LAYERS, steps=float(STEPS))
    client = algorithm.client_init(X, LAYERS)
    local = algorithm.begin(down, client, info)
    for _ in range(STEPS):
        local = algorithm.step(local, down, torch.full_like(X, gradient), LR, LAYERS)
    return algorithm.finish(local, down, client, info)[0], info


def broadcast(algorithm, round=1, **fields):
    server = algorithm.init(X, LAYERS)._replace(**fields)
    return algorithm.broadcast(server, ServerInfo(round, LR, LAYERS))


V = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)
MOMENTS = [
    ("fedams", {}, "v_hat", "v"),
    ("fedlamb", {"second_moment": "running"}, "v_hat", "v"),
    ("fedams", {"lazy": "accumulate", "sync_every": 2}, "v_hat", "v"),
    ("localadam", {}, "v", "v_hat"),
    ("localadam", {"amsgrad": False}, "v", "v_hat"),
    ("localadam", {"amsgrad": False, "v_seed": "zero"}, "v", "v_hat"),
    ("fedlada", {"decay": 0.0}, "v", "v_hat"),
    ("fedlada", {"moment_correction": "first_round", "ga_correction": True}, "v", "v_hat"),
    ("fedlada", {"amsgrad": False, "moment_correction": "m"}, "v", "v_hat"),
    ("fedlada", {"amsgrad": False, "v_seed": "zero"}, "v", "v_hat"),
    ("fedlada_lamb", {"amsgrad": False}, "v", "v_hat"),
]


@pytest.mark.parametrize(("name", "options", "sent_down", "sent_up"), MOMENTS)
def test_without_gradients_a_second_moment_is_what_was_inherited(name, options, sent_down, sent_up):
    options = {"decay": 0.0, **options}
    algorithm = lamina.create(name, **options)
    synchronised = options.get("sync_every", 1)
    down = broadcast(algorithm, synchronised, **{sent_down: V})
    up, info = upload(algorithm, down, round=synchronised)
    inherited = algorithm.inherited_moments(down, info)[sent_up]
    if "lazy" not in options:  # there a client may have begun with a larger one
        torch.testing.assert_close(getattr(up, sent_up), inherited)
    assert bool((getattr(up, sent_up) <= inherited + 1e-12).all())


def test_a_client_that_keeps_its_own_second_moment_inherits_nothing():
    algorithm = lamina.create("fedlamb", v_seed="client", v_init=1e-8, decay=0.0)
    down = broadcast(algorithm)
    up, info = upload(algorithm, down)
    assert float(algorithm.inherited_moments(down, info)["v"].abs().max()) == 0.0
    assert float(up.v.max()) <= 1e-8


def test_nothing_is_inherited_where_no_second_moment_is_sent():
    local = lamina.create("localadam", sync=False)
    assert local.inherited_moments(broadcast(local), ClientInfo(1, LR, LAYERS, steps=1.0)) == {}
    lazy = lamina.create("fedams", sync_every=2)
    assert lazy.inherited_moments(broadcast(lazy), ClientInfo(1, LR, LAYERS, steps=1.0)) == {}


@pytest.mark.parametrize("name", ["fedcm", "fedadam_star", "fedlada", "fedlada_lamb"])
def test_without_gradients_a_step_is_what_was_inherited(name):
    algorithm = lamina.create(name, decay=0.0)
    field = "momentum" if name in ("fedcm", "fedadam_star") else "g_a"
    down = broadcast(algorithm, **{field: V})
    up, info = upload(algorithm, down)
    inherited = algorithm.inherited_step(down, info)
    if name != "fedlada_lamb" or inherited is not None:
        torch.testing.assert_close(up.delta, inherited)


@pytest.mark.parametrize("round", [1, 2, 30])
@pytest.mark.parametrize("given", [{}, {"amendment": "per_client", "moment_correction": "m"}], ids=str)
def test_without_gradients_a_step_with_the_corrected_alpha_is_what_was_inherited(given, round):
    """The weight of g_a is 1 - alpha_r: 0 in round 1, and 1 - alpha in the long run."""
    algorithm = lamina.create("fedlada", decay=0.0, ga_correction=True, **given)
    down = broadcast(algorithm, round, g_a=V)
    up, info = upload(algorithm, down, round=round)
    inherited = algorithm.inherited_step(down, info)
    torch.testing.assert_close(up.delta, inherited)
    alpha = 0.1 / (1 - 0.9**round)
    torch.testing.assert_close(inherited, -LR * STEPS * (1 - alpha) * V)
    for name, value in algorithm.implied_fields(up, down, info).items():
        torch.testing.assert_close(getattr(up, name), value)


@pytest.mark.parametrize("name", ["fedcm", "fedadam_star"])
def test_a_clipped_mix_inherits_nothing_that_could_be_known(name):
    algorithm = lamina.create(name, clip_direction=0.1)
    assert algorithm.inherited_step(broadcast(algorithm), ClientInfo(1, LR, LAYERS, steps=1.0)) is None


def test_scaffolds_change_of_c_follows_from_delta_unless_it_is_scaled():
    algorithm = lamina.create("scaffold", decay=0.0)
    down = broadcast(algorithm, c=V)
    up, info = upload(algorithm, down, gradient=0.7)
    torch.testing.assert_close(up.delta_c, algorithm.implied_fields(up, down, info)["delta_c"])
    scaled = lamina.create("scaffold", scale=0.5)
    assert scaled.implied_fields(up, down, info) == {}
    fedavg = lamina.FedAvg()
    assert fedavg.implied_fields(up, down, info) == fedavg.inherited_moments(down, info) == {}
    assert fedavg.inherited_step(down, info) is None


def test_fedladas_mean_step_follows_from_delta():
    algorithm = lamina.create("fedlada", decay=0.0, amendment="per_client")
    down = broadcast(algorithm, g_a=V)
    up, info = upload(algorithm, down, gradient=0.7)
    torch.testing.assert_close(up.mean_step, algorithm.implied_fields(up, down, info)["mean_step"])
    assert lamina.create("fedlada").implied_fields(up._replace(mean_step=None), down, info) == {}
