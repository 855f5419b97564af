"""A federation in one process computes the same numbers as its simulation."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import lamina
from flower_grid import LoopGrid
from flower_setup import (
    MIME,
    NODE,
    Setup,
    assert_like_the_simulation,
    assert_same_run,
    is_train,
    nodes,
    other_weights,
    small_model,
)
from lamina.experiment.runs.records import read_record
from lamina.flower import Federation
from lamina.rounds.clients import Clients
from lamina.rounds.plan import Plan
from lamina.rounds.settings import TrainSettings


@pytest.mark.parametrize("algorithm", sorted(lamina.algorithms.registry()))
def test_a_federation_is_its_simulation(algorithm, tmp_path):
    setup = Setup(tmp_path, algorithm, rounds=3)
    setup.run()
    assert_like_the_simulation(setup)


@pytest.mark.parametrize(
    "given",
    [
        {"weighting": "examples", "schedule": "exponential", "clip": 0.5, "seed": 2**70 + 1},
        {"local_steps": 7, "sampling": "bernoulli", "participation": 0.5},
        {"batch_size": 1000, "epochs": 2},
        {"batch_size": None},
    ],
    ids=str,
)
def test_every_setting_of_the_protocol_reaches_the_nodes(given, tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=3, **given)
    setup.run()
    assert_like_the_simulation(setup)


@pytest.mark.parametrize("name", ["fedcm", "scaffold", "fedadam_star"])
def test_nodes_clip_the_direction_in_place_of_the_gradient(name, tmp_path):
    setup = Setup(tmp_path, lamina.create(name, clip_direction=0.05, decay=0.1), rounds=3, clip=0.01)
    setup.run()
    assert_like_the_simulation(setup)


def test_the_servers_weights_count_not_the_nodes(tmp_path):
    setup = Setup(tmp_path, "fedlada", node_model=other_weights, rounds=2)
    setup.run()
    assert_like_the_simulation(setup)


def brightness(batch, generator):
    return batch * torch.rand(len(batch), 1, 1, 1, generator=generator)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("augmentation", [lamina.data.Augment(2, crop_probability=0.5, fill="mean"), brightness])
def test_dropout_and_augmentation_follow_the_plan(tmp_path, engine, augmentation):
    def images(context=None):
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(0, 256, (40, 1, 6, 6), generator=generator, dtype=torch.uint8)
        y = torch.arange(40) % 3
        own = slice(None) if context is None else slice(20 * (i := context.node_config["partition-id"]), 20 * (i + 1))
        return x[own], y[own]

    def model():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    protocol = {"batch_size": 8, "augmentation": augmentation, "seed": 1, "device": "cpu"}
    parts = [list(range(20)), list(range(20, 40))]
    simulation = lamina.Simulation(model(), images(), "fedams", clients=parts, engine=engine, **protocol)
    simulation.run(3)
    federation = Federation("fedams", model, images, clients=2, rounds=3, out=tmp_path / "run", poll=0.005,
                            state_dir=tmp_path / "state", **protocol)  # fmt: skip
    grid = LoopGrid(federation.client_app(), nodes(2))
    federation.server_app()(grid, grid.contexts[NODE])
    rows = list(read_record(tmp_path / "run").history)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert_same_run(rows, weights, simulation.history, simulation.model.state_dict())


def test_batch_norm_statistics_travel_with_the_model(tmp_path):
    setup = Setup(tmp_path, "fedavg", model=lambda: small_model(norm=True), batch_size=16, rounds=3)
    setup.run()
    assert_like_the_simulation(setup)
    assert not torch.equal(setup.weights()["1.running_mean"], torch.zeros(8))


def test_batch_norm_statistics_travel_in_both_exchanges_of_the_original_mime(tmp_path):
    clock = {"step_seconds": 0.1, "download": 2.0, "upload": [0.001, 0.002, 0.1, 1.0], "latency": 0.5}
    setup = Setup(tmp_path, MIME, model=lambda: small_model(norm=True), batch_size=16, rounds=3, clock=clock)
    setup.run()
    assert_like_the_simulation(setup)  # the seconds on the clock, too
    model, statistics = 4 * (6 * 8 + 8 + 2 * 8 + 8 * 3 + 3), 4 * 2 * 8
    assert setup.rows[0]["bytes_down"] == 3 * (4 * model + 2 * statistics)
    assert setup.rows[0]["bytes_up"] == 3 * (3 * model + statistics)


def test_the_original_mime_needs_two_exchanges(tmp_path):
    setup = Setup(tmp_path, MIME, rounds=3, weighting="examples")
    grid = setup.run()
    assert_like_the_simulation(setup)
    kinds = [message.metadata.message_type for _, message in grid.seen if message.metadata.group_id == "2"]
    assert kinds == ["train.gradient"] * 3 + ["train"] * 3
    # the nodes keep x of the first exchange, so only the gradient travels twice
    second = [set(message.content["down"]) for _, message in grid.seen if is_train(message, 2)]
    assert second == [{"v_hat", "m", "mean_gradient"}] * 3
    model = 4 * (6 * 8 + 8 + 8 * 3 + 3)
    assert setup.rows[0]["bytes_down"] == 3 * 4 * model  # x; then v_hat, m and the mean gradient
    assert setup.rows[0]["bytes_up"] == 3 * 3 * model  # the gradient; then delta and the gradient


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    batch_size=st.none() | st.integers(1, 40),
    epochs=st.none() | st.integers(1, 3),
    local_steps=st.none() | st.integers(1, 9),
    seed=st.integers(-(2**70), 2**70),
    number=st.integers(1, 1000),
)
def test_a_client_that_knows_only_itself_plans_the_same_batches(sizes, batch_size, epochs, local_steps, seed, number):
    bounds = np.cumsum([0, *sizes])
    parts = [np.arange(a, b)[::-1] for a, b in itertools.pairwise(bounds)]
    epochs = None if local_steps else epochs
    settings = {"lr": 0.1, "batch_size": batch_size, "epochs": epochs, "local_steps": local_steps, "seed": seed}
    whole = Plan(Clients(parts, int(bounds[-1])), TrainSettings(**settings)).round(number)
    alone = Plan(Clients.elsewhere(len(sizes)), TrainSettings(**settings))
    for client, part in enumerate(parts):
        own = alone.round_of(number, np.array([client]), [np.arange(len(part))])
        assert own.steps[0] == whole.steps[client]
        assert own.streams[0] == whole.streams[client]
        for k in range(own.steps[0]):
            assert (part[own.batch(0, k)] == whole.batch(client, k)).all()
            assert (own.augment_keys(0, k) == whole.augment_keys(client, k)).all()


@pytest.mark.parametrize("algorithm", ["fedlamb", "scaffold"])
def test_the_clock_leaves_out_the_same_clients(algorithm, tmp_path):
    # of four clients, client 1 computes and sends slowly: it would answer after 3 * 2 s
    clock = {"step_seconds": [0.1, 2.0, 0.2, 0.5], "upload": 1.0, "deadline": 2.0, "over_select": 1.3}
    setup = Setup(tmp_path, algorithm, rounds=4, local_steps=3, clock=clock, participation=0.5)
    setup.run()
    assert_like_the_simulation(setup)
    simulation = setup.simulation()
    for row, other in zip(setup.rows, simulation.run(4), strict=True):
        assert row["asked"] == row["clients"] == other["clients"]
        assert row["clock_seconds"] == pytest.approx(other["clock_seconds"])
    assert 1 not in {one["client"] for attempt in setup.journal for one in attempt["took_part"]}
    with pytest.raises(lamina.BadInput, match=r"lie on a node: give local_steps"):
        Setup(tmp_path / "unknown", algorithm, clock=clock).run()
    with pytest.raises(lamina.BadInput, match="server has no training data to count FLOPs on: give step_seconds"):
        Setup(tmp_path / "flops", algorithm, clock={"flops_per_second": 1e9}).run()
