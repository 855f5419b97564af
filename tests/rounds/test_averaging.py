"""What the server averages: SCAFFOLD's control variate is a uniform mean whatever weighs the model."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lamina
from flower_setup import PARTS as NODES
from flower_setup import Setup, small_model
from helpers import processes
from lamina.base.errors import BadInput
from lamina.storage.checkpoint import Checkpoints, unpack
from small_simulations import PARTS, simulation

UNEQUAL = {"weighting": "examples", "participation": 0.6}
ROUNDS = 5


def assert_mean_of_all(c, controls, clients):
    """c = (1/N) sum of c_i, to rounding; clients that never took part count with c_i = 0."""
    expected = sum(controls) / clients
    assert float((c - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    assert float(expected.abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("mlp", "loop"), ("mlp", "stacked"), ("mlp", "captured"), ("batch_norm", "loop"), ("batch_norm", "stacked")],
)
def test_scaffold_control_is_the_mean_of_all_clients(kind, engine):
    run = simulation(kind, lamina.Scaffold(), engine, **UNEQUAL)
    parts = run.plan.clients.parts
    assert len({len(part) for part in parts}) > 1
    for _ in range(ROUNDS):
        run.run(1)
        assert_mean_of_all(run.state.server.c, [client.c for client in run.state.clients.values()], len(parts))


def test_engines_agree_on_weighted_scaffold():
    """One chunk of rows, chunks of one row, and the loop; the model's mean stays weighted."""
    loop = simulation("mlp", lamina.Scaffold(), "loop", **UNEQUAL)
    loop.run(ROUNDS)
    for rows in (None, 1, 2):
        run = simulation("mlp", lamina.Scaffold(), "stacked", **UNEQUAL)
        run.engine.rows_per_chunk = rows
        run.run(ROUNDS)
        for field in ("x", "c"):
            torch.testing.assert_close(getattr(run.state.server, field), getattr(loop.state.server, field))
    uniform = simulation("mlp", lamina.Scaffold(), "loop", participation=0.6)
    uniform.run(1)
    loop = simulation("mlp", lamina.Scaffold(), "loop", **UNEQUAL)
    loop.run(1)
    torch.testing.assert_close(uniform.state.server.c, loop.state.server.c)
    assert float((uniform.state.server.x - loop.state.server.x).abs().max()) > 1e-6


def worker(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        run = simulation("mlp", lamina.Scaffold(), "stacked", **UNEQUAL)
        run.run(ROUNDS)
        results[rank] = (run.state.server.c, {i: client.c for i, client in run.state.clients.items()})
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_scaffold_control_over_ranks():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        # from a server that has imported torch once
        mp.start_processes(worker, args=(port, results), nprocs=2, start_method=processes.get_start_method())
        results = dict(results)
    controls = {**results[0][1], **results[1][1]}
    for rank in range(2):
        assert_mean_of_all(results[rank][0], list(controls.values()), len(PARTS))


def test_scaffold_control_in_a_federation(tmp_path):
    """The nodes keep the c_i, the server's checkpoint has c."""
    setup = Setup(tmp_path, "scaffold", model=lambda: small_model().double(), weighting="examples")
    setup.run()
    checkpoints = Checkpoints(setup.out / "checkpoints")
    states = list(checkpoints.folder.glob(f"state-{checkpoints.rounds()[-1]:06}-*.safetensors"))
    c = unpack(states[0].read_bytes())["server/c"]
    newest = [sorted(folder.glob("state-*"))[-1] for folder in (tmp_path / "state").glob("*/client-*")]
    assert_mean_of_all(c, [unpack(path.read_bytes())["c"] for path in newest], len(NODES))
    alone = setup.simulation()
    alone.run(setup.rounds)
    torch.testing.assert_close(c, alone.state.server.c)


def test_a_uniform_field_must_be_one_of_up():
    class Misspelt(lamina.Scaffold):
        state_changes = ("delta_control",)

    with pytest.raises(BadInput, match="state_changes names 'delta_control', which is not a field of Up"):
        simulation("mlp", Misspelt(), "loop")
