"""Other readings of the Fed-LAMB paper's Algorithm 1: what each keeps, shares and refuses."""

import pytest
import torch

from lamina import BadInput, algorithms
from paper_problem import LAYERS, infos, local_run, make, vectors


def one_round(name, given, steps=3):
    """The server before a round of one new client, what the client sends and keeps, and the server after it."""
    algorithm, x = make(name, given), vectors(seed=1)
    server, info = algorithm.init(x, LAYERS), infos(1, 0.1, steps, vectors(seed=5))
    up, kept, _ = local_run(algorithm, server, algorithm.client_init(x, LAYERS), vectors(steps, seed=2), info)
    return server, up, kept, algorithm.update(server, up, info[0])


@pytest.mark.parametrize("name", ["fedams", "mime"])
def test_a_momentum_is_kept_by_the_client_by_the_server_or_by_nobody(name):
    for momentum, holders in (("carry", (True, False)), ("restart", (False, False)), ("average", (False, True))):
        _, up, kept, after = one_round(name, {"momentum": momentum})
        assert (kept.m is not None, after.m is not None) == holders
        assert momentum != "average" or torch.equal(after.m, up.m)


def test_without_synchronisation_every_client_keeps_its_own_second_moment():
    server, up, kept, after = one_round("fedams", {"sync": False})
    assert server.v_hat is up.v is after.v_hat is None
    assert (kept.v_hat > 0).all()
    assert not make("fedams", {"sync": False}).is_sync(1)


def test_a_running_second_moment_is_sent_and_never_below_the_one_of_the_server():
    server, up, _, _ = one_round("fedams", {"second_moment": "running", "v_init": 0.5, "beta2": 0.5})
    assert (up.v >= server.v_hat).all()
    assert (up.v > server.v_hat).any()
    assert (one_round("fedams", {"v_init": 0.5, "beta2": 0.5})[1].v < server.v_hat).any()  # the last v, as it is


def test_the_momentum_of_the_server_is_the_mean_of_full_gradients():
    server, up, kept, after = one_round("mime", {"momentum": "server", "beta1": 0.5})
    assert kept.m is None
    assert torch.allclose(after.m, 0.5 * server.m + 0.5 * up.gradient)
    lazy = make("mime", {"momentum": "server", "sync_every": 2})
    assert [lazy.down_versions(r) for r in (1, 2, 3)] == [{"v_hat": k, "m": k} for k in (0, 0, 1)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: algorithms.create("mime", control_variate=True, sync_every=2), "sync_every = 1"),
        (lambda: algorithms.create("fedams", v_init=0.0), "v_init = 0 leaves nothing to divide by"),
        (lambda: algorithms.create("fedams", v_init=0.0, first_round="running", sync_every=3),
         "v_init = 0 leaves nothing to divide by from round 2 until v_hat is synchronised after round 3"),
        (lambda: algorithms.create("fedams", v_init=0.0, first_round="running", sync=False), "joins after round 1"),
        (lambda: algorithms.create("fedlamb", sync=False, sync_every=3), "sync_every = 3 acts only with sync = true"),
    ],
)  # fmt: skip
def test_readings_that_do_not_go_together_are_refused_in_one_line(call, text):
    with pytest.raises(BadInput, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)
