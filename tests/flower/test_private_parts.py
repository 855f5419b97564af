"""Private parts of a model in a federation: on the nodes' disks, in no message, and as in the simulation."""

import functools
import shutil

import pytest
import torch
from flwr.app import ArrayRecord

import lamina
from flower_setup import MIME, PARTS, Setup, assert_like_the_simulation, client_of, is_train, small_model, the_data
from lora import adapted
from second_gradients import Ditto

NETWORK = functools.partial(small_model, norm=True)  # Linear(6, 8), BatchNorm, ReLU, Linear(8, 3)
PRIVATE = {"private": ["1.*", "3.*"], "batch_size": 5}
SHARED = 6 * 8 + 8
ADAPTERS = functools.partial(adapted, 6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "model", "private", "size"),
    [
        *((name, NETWORK, PRIVATE, SHARED) for name in ("fedlada", "fedlamb", "scaffold", MIME)),
        ("fedlada", ADAPTERS, PRIVATE | {"private": ["*lora_B*"]}, 6 * 2 + 8 * 2),
    ],
    ids=["fedlada", "fedlamb", "scaffold", "mime", "adapters"],
)
def test_the_federation_agrees_with_the_simulation(algorithm, model, private, size, tmp_path):
    no_limit = {"limits": lamina.flower.Limits(times_median=None)}  # of four tiny clients, one may stand out
    setup, sizes = Setup(tmp_path, algorithm, model=model, **private, more=no_limit), set()

    def watch(grid, node, message, reply=None):
        content = message.content if reply is None else reply.content
        arrays = [array for record in content.values() if isinstance(record, ArrayRecord) for array in record.values()]
        sizes.update(array.numpy().size if array.stype != "lamina.raw" else len(array.data) // 4 for array in arrays)
        return message if reply is None else reply

    setup.run(setup.grid(watch, watch))
    assert_like_the_simulation(setup)
    assert sizes == {size}


def test_nodes_evaluate_their_own_models(tmp_path):
    setup = Setup(tmp_path, "fedlada", model=NETWORK, **PRIVATE, rounds=3, more={"evaluate_on": "nodes"})
    setup.run()
    simulation, (x, y) = setup.simulation(), the_data()
    for row in setup.rows:
        simulation.run(1)
        right = [(simulation.client_model(i)(x[part]).argmax(1) == y[part]).sum() for i, part in enumerate(PARTS)]
        assert row["node_accuracy"] == pytest.approx(float(sum(right)) / len(x), abs=1e-6)


def test_nodes_use_the_models_that_the_algorithm_keeps_for_them(tmp_path):
    setup = Setup(tmp_path, Ditto(), rounds=3, more={"evaluate_on": "both"})
    setup.run()
    assert_like_the_simulation(setup)
    simulation, (x, y) = setup.simulation(), the_data()
    simulation.run(3)
    right = [(simulation.client_model(i)(x[part]).argmax(1) == y[part]).sum() for i, part in enumerate(PARTS)]
    assert setup.rows[-1]["node_accuracy"] == pytest.approx(float(sum(right)) / len(x), abs=1e-6)


def test_a_node_that_lost_its_part_starts_it_again(tmp_path):
    setup = Setup(tmp_path, "fedavg", model=NETWORK, **PRIVATE | {"participation": 1.0}, rounds=3)

    def on_send(grid, node, message):
        if is_train(message, 3) and client_of(node) == 1:
            (folder,) = (tmp_path / "state").glob("*/client-1")
            shutil.rmtree(folder)
        return message

    setup.run(setup.grid(on_send))
    simulation = setup.simulation()
    simulation.run(2)
    del simulation.state.clients[1]
    simulation.run(1)
    for name, value in simulation.model.state_dict().items():
        torch.testing.assert_close(setup.weights()[name], value, rtol=1e-6, atol=1e-8)


def test_nodes_whose_private_parts_start_elsewhere_are_refused(tmp_path):
    """The model function must give the same weights in every process: nothing sends those of private parts."""
    once = {"attempts": 1, "deadline": 0.5}
    setup = Setup(tmp_path, "fedavg", model=NETWORK, node_model=unseeded, **PRIVATE, rounds=1, more=once)
    with pytest.raises(lamina.LaminaError, match="initial values of its private parts are not this node's"):
        setup.run()


def unseeded():
    model = small_model(norm=True)
    torch.nn.init.normal_(model[3].weight)
    return model
