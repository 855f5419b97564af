"""Early stopping: `patience`, in memory, in folders, in populations, after a kill."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lamina
from lamina.experiment.runs.records import find_records
from lamina.experiment.trials.trials import has_ended
from lamina.training.history import History

SCORES = [0.2, 0.5, 0.4, 0.5, 0.3, 0.9, 0.1]


def history(scores, metric="accuracy"):
    return History([{"round": i, metric: score} for i, score in enumerate(scores, 1)], metric)


def stop_round(scores, patience):
    """The first round after `patience` values that are no better than one before, by trying all; None: never."""
    for now in range(len(scores)):
        for best in range(now - patience + 1):
            if all(later <= scores[best] for later in scores[best + 1 : now + 1]):
                return now + 1
    return None


@pytest.mark.parametrize("patience", [1, 2, 3, 4])
def test_it_stops_after_so_many_values_without_a_better_one(patience):
    expected = stop_round(SCORES, patience)
    stalled = [n for n in range(1, len(SCORES) + 1) if history(SCORES[:n]).has_stalled(patience)]
    assert (stalled[0] if stalled else None) == expected
    losses = [-score for score in SCORES]
    assert [n for n in range(1, len(SCORES) + 1) if history(losses[:n], "loss").has_stalled(patience)] == stalled


def test_rounds_without_a_number_do_not_count():
    rows = [{"round": 1, "accuracy": 0.5}, {"round": 2}, {"round": 3, "accuracy": float("nan")}]
    assert not History(rows, "accuracy").has_stalled(1)
    assert History([*rows, {"round": 4, "accuracy": 0.5}], "accuracy").has_stalled(1)
    assert not History([], "accuracy").has_stalled(1)


X = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
DATA = (X, (X[:, 0] > 0).long())


def simulation(patience=2, lr=0.5, seed=0, **more):
    options = {"test": DATA, "clients": 4, "lr": lr, "seed": seed, "device": "cpu", "patience": patience, **more}
    return lamina.Simulation(lambda: nn.Linear(4, 2), DATA, "fedavg", **options)


def numbers(rows):
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_stops_where_its_scores_say(engine, every):
    whole = simulation(None, engine=engine, evaluate_every=every).run(60)
    evaluated = [row for row in whole if "accuracy" in row]
    last = evaluated[stop_round([row["accuracy"] for row in evaluated], 2) - 1]["round"]
    assert last < 60
    short = simulation(engine=engine, evaluate_every=every)
    assert numbers(short.run(60)) == numbers(whole[:last])
    assert short.has_stopped
    assert len(short.run(5)) == last  # and stays where it is


def test_members_of_a_population_do_not_stop_each_other():
    def members():
        return [simulation(2, 0.5), simulation(2, 0.01), simulation(None, 0.5, seed=1)]

    alone = [one.run(30) for one in members()]
    together = lamina.Population(members()).run(30)
    lengths = [len(one) for one in alone]
    assert lengths[0] < 30 == lengths[2]
    assert [len(one) for one in together] == lengths
    for one, other in zip(alone, together, strict=True):
        assert one.column("accuracy") == other.column("accuracy")


def test_a_stopped_run_is_complete_in_its_folder(tmp_path):
    expected = simulation().run(60)
    first = simulation(out=tmp_path / "run")
    first.run(60)
    assert numbers(first.history) == numbers(expected)
    (record,) = find_records([tmp_path])
    assert record.complete
    assert len(record.history) == len(expected) < record.config["train"]["rounds"]
    again = simulation(out=tmp_path / "run")
    assert numbers(again.run(60)) == numbers(expected)
    assert torch.equal(again.state.server.x, first.state.server.x)
    weights = lamina.load(tmp_path / "run").model.weight
    assert torch.equal(weights, first.model.weight)


@pytest.mark.parametrize("killed_after", [1, "at the stop"])
def test_a_killed_run_stops_where_an_uninterrupted_one_does(tmp_path, killed_after):
    expected = simulation().run(60)

    def kill(row):
        if row["round"] == (len(expected) if killed_after == "at the stop" else killed_after):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulation(out=tmp_path / "run").run(60, kill)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    resumed = simulation(out=tmp_path / "run")
    assert numbers(resumed.run(60)) == numbers(expected)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_more_patience_continues_a_run_and_less_is_another_run(tmp_path):
    expected = simulation(4).run(60)
    length = len(simulation(2, out=tmp_path / "run").run(60))
    assert numbers(simulation(4, out=tmp_path / "run").run(60)) == numbers(expected)
    assert len(expected) > length
    with pytest.raises(lamina.BadInput, match=r"train.patience = 4 \(now 2\)"):
        simulation(2, out=tmp_path / "run").run(60)


@pytest.mark.parametrize(
    ("train", "ended"), [({}, True), ({"patience": 9}, False), ({"patience": None}, False), ({"rounds": 1}, True)]
)
def test_a_trial_has_ended_where_its_patience_stops_it(tmp_path, train, ended):
    assert len(simulation(2, out=tmp_path / "run").run(60)) < 9
    settings = SimpleNamespace(**{"rounds": 60, "patience": 2} | train)
    job = SimpleNamespace(folder=tmp_path / "run", experiment=SimpleNamespace(train=settings))
    assert has_ended(job) == ended


@pytest.mark.long
def test_every_run_of_a_comparison_stops_on_its_own(tmp_path):
    result = lamina.compare(lambda: nn.Linear(4, 2), DATA, ["fedavg", "fedlamb"], test=DATA, clients=4, rounds=30,
                            seeds=2, lr={"fedavg": 0.5, "fedlamb": 0.05}, patience=2, device="cpu",
                            out=tmp_path / "c")  # fmt: skip
    for lists in result.histories.values():
        for one in lists:
            scores = one.column("accuracy")
            assert len(one) == (stop_round(scores, 2) or 30)
    assert all(record.complete for record in find_records([tmp_path / "c"]))
    assert not any("not finished" in note for note in result.notes)


def test_patience_needs_test_data_and_a_whole_number():
    with pytest.raises(lamina.BadInput, match="patience counts evaluations on test data"):
        simulation(test=None)
    with pytest.raises(lamina.BadInput, match="patience"):
        simulation(0)


@pytest.mark.parametrize("folder", [False, True])
def test_it_makes_no_difference_where_a_call_of_run_ends(tmp_path, folder):
    """The evaluation at the end of `run` counts only if one was due in that round."""
    options = {"patience": 2, "evaluate_every": 2}
    expected = len(simulation(**options).run(60))
    assert expected < 60
    run = simulation(**options, **({"out": tmp_path / "run"} if folder else {}))
    for _ in range(20):
        run.run(3)
    assert len(run.history) == expected
    assert "accuracy" in run.history[2]  # it was evaluated there
    if folder:
        assert find_records([tmp_path])[0].complete
        assert len(simulation(**options, out=tmp_path / "run").run(60)) == expected
