"""A federation in one process agrees with its simulation for every kind of input, target and loss."""

import pytest
import torch
from safetensors.torch import load_file

import kinds
import lamina
from flower_grid import LoopGrid
from flower_setup import nodes
from lamina.data import as_dataset
from lamina.flower import Federation

ROUNDS = 2


def federation(kind, folder, part, **settings):
    """The federation of `kinds.simulation`."""
    _, data, loss = kinds.KINDS[kind]
    return Federation(
        "fedlada", lambda: kinds.model(kind), part, clients=3, rounds=ROUNDS, test=lambda: as_dataset(data()),
        out=folder / "run", state_dir=folder / "state", device="cpu", poll=0.005, deadline=5.0, loss=loss,
        batch_size=4, participation=0.7, lr=0.05, seed=3, **settings,
    )  # fmt: skip


def run(made):
    grid = LoopGrid(made.client_app(), nodes(3))
    made.server_app()(grid, next(iter(grid.contexts.values())))


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_a_federation_is_its_simulation(kind, tmp_path):
    whole = as_dataset(kinds.KINDS[kind][1]())
    run(federation(kind, tmp_path, lambda context: whole.subset(kinds.PARTS[context.node_config["partition-id"]])))
    expected = kinds.simulation(kind, "loop")
    expected.run(ROUNDS)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11)


def test_text_labels_without_names_are_refused(tmp_path):
    made = federation("dict", tmp_path, lambda context: ({"input_ids": [[1, 2], [3]]}, ["ham", "spam"]))
    with pytest.raises(lamina.LaminaError, match=r"class_names=\[…\]"):
        run(made)
