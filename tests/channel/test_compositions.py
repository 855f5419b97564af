"""What goes together, as the table of the page on codecs says: every algorithm with every part of a channel."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lamina
from lamina.algorithms.rehearsal import sent_vectors
from lamina.base.errors import BadInput
from lamina.channel.privacy import Noise, Privacy

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(60) % 3
PRIVACY = Privacy(0.5, 1e-3, 1.0, secret_cohorts=False, noise=Noise(b"fixed", 0.1))
FEEDBACK = {"codec": "sign", "feedback": True}
EVERYTHING = {"channel": FEEDBACK | {"down": "bf16"}, "private": ["2.*"], "clock": "4g"}
ALGORITHMS = {name: lamina.create(name) for name in sorted(lamina.algorithms.BUILT_IN)}
EXACT = {name for name, algorithm in ALGORITHMS.items() if algorithm.exact_messages}  # take neither codecs nor privacy
ORIGINAL_MIME = lamina.create("mime", preset="mime")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "send-fewer-bytes.md"


def simulation(algorithm, norm=nn.Identity, **more):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), norm(5), nn.Linear(5, 3)).double()
    settings = {"clients": 6, "participation": 0.5, "local_steps": 2, "batch_size": 5, "lr": 0.01}
    return lamina.Simulation(model, (X, Y), algorithm, **settings | more)


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm",
    [*(a for name, a in ALGORITHMS.items() if name not in EXACT), ORIGINAL_MIME],
    ids=lambda a: f"{a.card.name} {a}"[:40],
)
def test_all_algorithms_take_codecs_private_parts_clocks_and_a_narrow_broadcast(algorithm):
    whole, plain = simulation(algorithm, **EVERYTHING), simulation(algorithm)
    for run in (whole, plain):
        run.run(2)
    assert torch.isfinite(whole.state.server.x).all()
    # the gradient of the original Mime's first exchange goes through no codec: of each client, without private parts
    exact = [3 * run.state.server.x.numel() * 8 * algorithm.needs(1).control_variate for run in (whole, plain)]
    coded, uncoded = (run.history[-1]["bytes_up"] - each for run, each in zip((whole, plain), exact, strict=True))
    assert coded < uncoded / 5
    assert whole.history[-1]["clock_seconds"] > 0


def test_which_methods_need_the_exact_mean():
    assert {"fedexp", "scaffnew"} == EXACT


PRIVATE = {name: algorithm for name, algorithm in ALGORITHMS.items() if name not in {*EXACT, "fednova"}}


@pytest.mark.parametrize("algorithm", PRIVATE.values(), ids=PRIVATE)
def test_all_but_the_original_mime_take_privacy_with_codecs_and_private_parts(algorithm):
    run = simulation(algorithm, privacy=PRIVACY, **EVERYTHING)
    assert run.run(2)[-1]["epsilon"] > 0
    for name in algorithm.non_negative:
        assert (getattr(run.state.server, algorithm.references[name]) >= 0).all()


def test_the_original_mime_is_refused():
    with pytest.raises(BadInput, match="publishes the mean gradient"):
        simulation(ORIGINAL_MIME, privacy=PRIVACY)


def test_the_table_lists_every_algorithm_with_its_vectors():
    rows = re.findall(r"^\| ([^|]+) \| ((?:`\w+`,? ?)+)\| (?:yes|no)[^|]*\| ([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    listed = {}
    for titles, vectors, differences in rows:
        for title in titles.replace("\\", "").split(", "):
            listed[title.removeprefix("server-side ")] = (
                re.findall(r"`(\w+)`", vectors),
                re.findall(r"`(\w+)`", differences),
            )
    layers = lamina.Layers({"a": (3, 2), "b": (2,)})
    for algorithm in ALGORITHMS.values():
        names = sent_vectors(algorithm, layers), list(algorithm.references)
        assert listed[algorithm.card.title.split(" (")[0]] == (list(names[0]), names[1])


@pytest.mark.parametrize(
    "more", [{"weighting": "examples"}, {"aggregation": "median"}, {"norm": nn.BatchNorm1d}], ids=str
)
def test_what_codecs_take_and_privacy_refuses(more):
    simulation("fedlamb", channel=FEEDBACK, **more).run(1)
    with pytest.raises(BadInput, match=r"^privacy: "):
        simulation("fedlamb", privacy=PRIVACY, **more)


def test_batchnorm_that_stays_with_the_clients_goes_with_privacy():
    simulation("fedlamb", norm=nn.BatchNorm1d, private=["1.*"], privacy=PRIVACY).run(1)


@pytest.mark.parametrize("clock", [{"deadline": 1000.0}, {"over_select": 1.5}], ids=str)
def test_privacy_refuses_clocks_that_leave_clients_out(clock):
    with pytest.raises(BadInput, match="leave deadline and over_select out"):
        simulation("fedavg", clock={"name": "4g", **clock}, privacy=PRIVACY)
