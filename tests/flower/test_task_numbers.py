"""Tasks are numbered across restarts: what the server sends is never taken for a replay, and replays are refused."""

import json
import shutil
import time

import pytest

from flower_grid import over_the_wire
from flower_setup import NODE, Setup, as_sent, assert_like_the_simulation, is_train, problem
from helpers import Killed
from lamina.flower import Stopped

HOURS_11 = 40_000 * 10**9  # ns


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path, "scaffold", rounds=3, participation=1.0)


def kill_server(setup, number=2, asked=3):
    """Run a federation, and kill its server before it sends the asked-th task to train of a round."""

    def on_send(grid, node, message):
        if is_train(message, number) and sum(is_train(m, number) for _, m in grid.seen) == asked:
            raise Killed
        return message

    grid = setup.grid(on_send)
    with pytest.raises(Killed):
        setup.run(grid)
    return grid


def assert_undisturbed(setup):
    """Every client took part in every round, with the numbers of the simulation."""
    assert_like_the_simulation(setup)
    assert [len(entry["took_part"]) for entry in setup.journal] == [4] * setup.rounds


@pytest.mark.parametrize("offset", [HOURS_11, -HOURS_11])
def test_a_clock_that_is_wrong_after_the_last_checkpoint_does_no_harm(setup, offset, monkeypatch):
    with monkeypatch.context() as patch:
        real = time.time_ns
        patch.setattr(time, "time_ns", lambda: real() + offset * (setup.out / "checkpoints").exists())
        kill_server(setup)
    setup.run()
    assert_undisturbed(setup)


def test_a_server_killed_several_times_in_one_round_resumes(setup):
    for asked in (4, 3, 2):
        kill_server(setup, asked=asked)
    setup.run()
    assert_undisturbed(setup)
    assert (setup.out / "starts").read_text() == "4\n"


def test_the_checkpoint_stands_in_for_a_lost_count_of_starts(setup):
    setup.rounds = 2
    setup.run()
    path = setup.out / "starts"
    path.unlink()
    setup.rounds = 3
    setup.run()
    assert_undisturbed(setup)
    assert path.read_text() == "2\n"


def test_a_new_run_with_the_same_nodes_is_accepted(setup):
    """After the run's folder was deleted, and beside another federation of the same nodes."""
    setup.run()
    shutil.rmtree(setup.out)
    setup.run()
    assert_undisturbed(setup)
    setup.run(out=setup.folder / "other")
    assert len(list((setup.folder / "state").iterdir())) == 3


def test_tasks_of_an_earlier_start_are_refused(setup):
    killed = kill_server(setup)
    grid = setup.run()
    for message in as_sent(killed.seen)[NODE + 1]:
        assert "it is a replay" in problem(setup.client_app()(over_the_wire(message), grid.contexts[NODE + 1]))


def test_a_run_of_an_earlier_version_continues(setup):
    """Its nodes and its checkpoint hold a time instead of a number, which may lie in the future."""
    kill_server(setup)
    (setup.out / "starts").unlink()
    for path in (setup.folder / "state").glob("*/client-*/last-task"):
        path.with_name("issued").write_text(str(2**52))
        path.unlink()
    rewrite_facts(setup, lambda facts: {**facts, "issued": 2**51})
    setup.run()
    assert_undisturbed(setup)


def rewrite_facts(setup, change):
    """Change what the checkpoints say beside the model, and drop the number of the last task."""
    from lamina.storage.checkpoint import _manifest_sum

    for path in (setup.out / "checkpoints").glob("round-*.json"):
        content = json.loads(path.read_text())["content"]
        facts = change(content["history"][0])
        content["history"] = [{name: value for name, value in facts.items() if name != "last_task"}]
        path.write_text(json.dumps({"sha256": _manifest_sum(content), "content": content}))


def test_an_old_copy_of_the_run_folder_is_named_in_the_refusal_and_catches_up(setup):
    setup.more["attempts"] = 1
    kill_server(setup)
    copy = setup.folder / "copy"
    shutil.copytree(setup.out, copy)
    kill_server(setup, number=3)
    shutil.rmtree(setup.out)
    copy.rename(setup.out)
    with pytest.raises(Stopped, match=r"the server resumes an old copy of its run folder \(then start it"):
        setup.run()
    setup.run()
    assert len(setup.rows) == 3
