"""The lists of checks: who runs them, and what needs the whole run."""

import pytest
import torch
from torch import nn

import lamina
from flower_setup import Setup
from lamina.training import preflight

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def test_every_check_is_in_a_list():
    listed = {*preflight.MODEL, *preflight.TRAINING_AND_TEST_DATA, *preflight.TRAINING_DATA}
    called_by_name = {"check_settings", "check_alike", "check_lone_samples", "check_metrics", "check_small_batches",
                      "warn_of_padding", "check_augmentation"}  # fmt: skip
    modules = (preflight.inputs, preflight.loss, preflight.metrics, preflight.model, preflight.outputs,
               preflight.targets)  # fmt: skip
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith(("check_", "warn_of_")) and value.__module__ == module.__name__:
                assert value in listed or name in called_by_name, name


@pytest.mark.parametrize(("algorithm", "is_warned_of"), [("scaffold", True), ("fedavg", False)])
def test_state_of_clients_whose_data_move_is_warned_of(algorithm, is_warned_of, caplog):
    lamina.Simulation(nn.Linear(4, 3), (X, Y), algorithm, clients=3, partition="reallocate", device="cpu")
    assert ("clients keep state between rounds, but 'reallocate'" in caplog.text) is is_warned_of


def test_a_server_refuses_test_data_that_do_not_fit_before_it_asks_a_node(tmp_path):
    setup = Setup(tmp_path, "fedavg", rounds=1, more={"test": lambda: (torch.randn(6, 9), torch.arange(6) % 2)})
    asked = []
    grid = setup.grid(on_reply=lambda grid, node, message, reply: asked.append(node) or reply)
    with pytest.raises(lamina.BadInput, match=r"the model cannot take the test data, samples of shape \(9,\)"):
        setup.run(grid)
    assert not asked
