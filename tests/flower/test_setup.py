"""Settings that a user may get wrong, the quorum, and a node's test data."""

import pytest
from torch import nn

import lamina
from flower_grid import LoopGrid
from flower_setup import Setup, nodes, part_of, small_model
from lamina.base.errors import BadInput
from lamina.flower import Federation


def test_the_test_data_of_a_node_are_matched_to_its_training_data(tmp_path):
    pandas = pytest.importorskip("pandas")

    def table_of(context):
        x, y = part_of(context)
        return pandas.DataFrame(x.numpy(), columns=list("abcdef")), y

    def turned(context):
        x, y = table_of(context)
        return x[list("fedcba")], y

    losses = []
    for node_test in (table_of, turned):
        setup = Setup(tmp_path / node_test.__name__, "fedavg", rounds=1, more={"evaluate_on": "nodes"})
        made = Federation("fedavg", small_model, table_of, clients=4, rounds=1, out=setup.out, device="cpu",
                          state_dir=tmp_path, node_test=node_test, **setup.protocol, **setup.more)  # fmt: skip
        grid = LoopGrid(made.client_app(), nodes())
        made.server_app()(grid, next(iter(grid.contexts.values())))
        losses.append(setup.rows[-1]["node_loss"])
    assert losses[0] == losses[1]


class Forgetful(lamina.FedAvg):
    """Its finish forgets the client's state."""

    def finish(self, local, down, client, info):
        return super().finish(local, down, client, info)[0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": nn.Linear(2, 2)}, "model is a Linear: give a function"),
        ({"data": (1, 2)}, "data is a tuple: give a function"),
        ({"clients": 0}, "clients = 0 is not a whole number >= 1"),
        ({"rounds": 1.5}, "rounds = 1.5 is not a whole number"),
        ({"quorum": 1.5}, "quorum = 1.5 is neither a fraction"),
        ({"quorum": 0}, "quorum = 0 is not a number > 0"),
        ({"quorum": 3}, "quorum = 3 of 2 clients can never answer: give at most 2"),
        ({"deadline": -1}, "deadline = -1 is not a number > 0"),
        ({"evaluate_on": "node"}, "unknown evaluate_on 'node'; did you mean 'nodes'"),
        ({"weighting": "sample"}, "unknown weighting"),
        ({"loss": "hinge"}, "unknown loss"),
        ({"algorithm": "fedlam"}, "did you mean 'fedlamb'"),
        ({"batch_size": 0}, "batch_size = 0"),
    ],
)
def test_wrong_settings_are_one_clear_line(given, why):
    settings = {"algorithm": "fedlamb", "model": small_model, "data": part_of, "clients": 2, **given}
    with pytest.raises(BadInput, match=why):
        Federation(**settings)


def test_an_algorithm_that_breaks_the_contract_is_refused_when_the_model_is_built():
    with pytest.raises(BadInput, match="breaks the contract: finish must return two things"):
        Federation(Forgetful(), small_model, part_of, clients=2, device="cpu").objective()


@pytest.mark.parametrize(
    ("quorum", "cohort", "needed"), [(0.5, 4, 2), (0.5, 5, 3), (1.0, 3, 3), (2, 5, 2), (9, 3, 3), (0.01, 3, 1)]
)
def test_the_quorum_is_a_fraction_or_a_number(quorum, cohort, needed):
    assert Federation("fedavg", small_model, part_of, clients=9, quorum=quorum).needed(cohort) == needed
