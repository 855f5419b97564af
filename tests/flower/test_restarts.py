"""A server that is killed and started again."""

import pytest
import torch

import lamina
from flower_setup import (
    MIME,
    Setup,
    assert_like_the_simulation,
    is_train,
)
from helpers import Killed
from lamina.base.errors import BadInput

ALGORITHMS = {
    "scaffold": "scaffold",
    "lazy fedlamb": lamina.algorithms.create("fedlamb", sync_every=2),
    "mime": MIME,
}
ROUNDS = 5


@pytest.fixture(scope="module", params=ALGORITHMS)
def undisturbed(request, tmp_path_factory):
    setup = Setup(tmp_path_factory.mktemp("undisturbed"), ALGORITHMS[request.param], rounds=ROUNDS)
    setup.run()
    return setup


@pytest.fixture
def restartable(undisturbed, tmp_path):
    setup = Setup(tmp_path / "killed", undisturbed.algorithm, rounds=ROUNDS)
    yield setup
    assert [e["round"] for e in setup.journal] == list(range(1, ROUNDS + 1))
    expected = undisturbed.weights()
    assert all(torch.equal(value, expected[name]) for name, value in setup.weights().items())
    for row, other in zip(setup.rows, undisturbed.rows, strict=True):
        for name in row.keys() - {
            "seconds",
            "evaluation_seconds",
            "wire_bytes_down",
            "wire_bytes_up",
            *setup.other_columns,
        }:
            assert row[name] == other[name], (row["round"], name)


def kill_server(setup, number, asked=1):
    """Run a federation and kill its server when it asks the first, second, … node for the update of a round."""

    def on_send(grid, node, message):
        if is_train(message, number) and sum(is_train(m, number) for _, m in grid.seen) == asked:
            raise Killed
        return message

    with pytest.raises(Killed):
        setup.run(setup.grid(on_send))


@pytest.mark.long
def test_a_killed_server_resumes_in_the_middle_of_a_round(restartable):
    kill_server(restartable, number=4, asked=2)
    assert len(restartable.rows) == 3
    restartable.run()


@pytest.mark.long
@pytest.mark.parametrize("moment", ["after the row", "after the attendance"])
def test_a_server_killed_between_two_writes_never_mixes_rounds(restartable, moment, monkeypatch):
    from lamina.experiment.runs.folder import RunFolder
    from lamina.storage.checkpoint import Checkpoints

    with monkeypatch.context() as patch:
        cls, method = {"after the row": (Checkpoints, "save"), "after the attendance": (RunFolder, "record")}[moment]
        whole = getattr(cls, method)

        def dies(self, *args):
            state = args[0] if method == "save" else args[1].state
            if state.round == 4:
                raise Killed
            return whole(self, *args)

        patch.setattr(cls, method, dies)
        with pytest.raises(Killed):
            restartable.run()
    assert len(restartable.journal) == 4
    restartable.run()


@pytest.mark.long
def test_a_damaged_newest_checkpoint_costs_one_round(restartable):
    kill_server(restartable, number=5, asked=3)  # two nodes have trained round 5, and tidied up
    (newest,) = (restartable.out / "checkpoints").glob("round-000004.json")
    newest.write_text("{}")
    restartable.run()  # from round 3: the nodes still have the states of that time, if not the cached fields
    restartable.other_columns = {"bytes_down"} if restartable.algorithm.down_versions(1) else set()


@pytest.mark.long
def test_other_nodes_after_a_restart_take_over(restartable):
    """A node that makes a new key gets a new id; its disk is the same."""
    kill_server(restartable, number=4)
    grid = restartable.grid(configs={77 + i: {"partition-id": i} for i in range(4)})
    restartable.run(grid)


def test_a_finished_run_is_left_alone(tmp_path):
    setup = Setup(tmp_path, "fedavg", rounds=2)
    setup.run()
    grid = setup.run()
    assert grid.seen == []
    setup.rounds = 3
    setup.run()
    assert_like_the_simulation(setup)


def test_another_run_in_the_folder_is_refused(tmp_path):
    Setup(tmp_path, "fedavg", rounds=1).run()
    with pytest.raises(BadInput, match="holds another run"):
        Setup(tmp_path, "scaffold", rounds=1).run()
