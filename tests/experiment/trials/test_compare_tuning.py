"""How a comparison chooses the settings of each method."""

import contextlib
import csv
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from comparisons import GRID, ROUNDS, RUNS, TOML, assert_same_comparison, command
from helpers import call, populations, rows, skip_pictures
from lamina.experiment.runs.records import find_records, read_record
from lamina.experiment.trials import compare as comparing
from lamina.experiment.trials.settings import folder_name
from lamina.report.rates import responses
from lamina.training import history
from lamina.training.training import Training


@pytest.fixture(scope="module", autouse=True)
def _short_runs():
    """Judge by the last round: the runs are as short as what is averaged in runs of hundreds of rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "LAST_ROUNDS", 1)
        yield


@pytest.fixture
def here(empty_folder, monkeypatch):
    Path("small.toml").write_text(TOML)
    skip_pictures(monkeypatch)
    return empty_folder


def test_options_are_tried_with_every_rate_side_by_side(here, monkeypatch, capsys):
    grouped = populations(monkeypatch)
    assert call(*[word for word in command("c", *GRID) if word != "--quiet"]) == 0
    assert [[len(group) for group in groups] for groups in grouped] == [[4], [1]]
    said = capsys.readouterr()
    records = {record.folder.name: record for record in find_records(["c/tuning"])}
    assert set(records) == {f"lr{lr}-decay{decay}" for lr in (0.01, 0.1) for decay in (0.0, 0.01)}
    assert {record.seed for record in records.values()} == {-1}  # seeds of final runs count up from 0
    scores = {name: record.history.final() for name, record in records.items()}
    best = records[max(scores, key=scores.get)].config
    final = read_record("c/fedlamb/seed0").config
    assert (final["train"]["lr"], final["algorithm"]["decay"]) == (best["train"]["lr"], best["algorithm"]["decay"])
    kept = json.loads(Path("c/config.json").read_text())["algorithms"]["fedlamb"]
    assert (kept["lr"], kept["decay"]) == (final["train"]["lr"], final["algorithm"]["decay"])
    with Path("c/tuning.csv").open() as file:
        tried = list(csv.DictReader(file))
    assert list(tried[0]) == ["algorithm", "learning_rate", "decay", "rounds", "final_validation_accuracy", "chosen"]
    names = [f"lr{row['learning_rate']}-decay{row['decay']}" for row in tried]
    assert dict(zip(names, (float(row["final_validation_accuracy"]) for row in tried), strict=True)) == scores
    assert [row["decay"] for row in tried if row["chosen"] == "True"] == [str(final["algorithm"]["decay"])]
    assert "note: settings were chosen on 20% of the training data, held out" in said.out
    assert "note: final runs hold nothing out, so their epochs may have more steps" in said.out
    assert f"fedlamb: lr {final['train']['lr']:g}, decay {final['algorithm']['decay']:g} was chosen" in said.out
    assert "the best decay 0 lies" not in said.out  # nothing lies below 0
    assert re.search(r"tuning fedlamb, lr 0.01, decay 0.01, seed -1, \d+ rounds: final validation accuracy", said.err)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("compare.grid.fedlamb.decai=[0.1]", "no option 'decai'; did you mean 'decay'"),
        ("compare.grid.fedlamb.decay=[-1.0, 0.0]", "decay = -1.0"),
        ("compare.grid.fedlamb.decay=0.1", "compare.grid.fedlamb.decay = 0.1: must be a list"),
        ("compare.grid.fedlamb.lr=[]", "compare.grid.fedlamb.lr = []: must not be empty"),
        ("compare.grid.fedlamb.name=['fedavg']", "[compare.grid.fedlamb] has no key 'name'"),
        ("compare.lr.fedlamb=[0.1]", "[compare] has no key 'lr'"),
        ("compare.tuning_rounds=0", "compare.tuning_rounds.0 = 0: input should be greater than"),
        ("compare.tuning_rounds=2.5", "compare.tuning_rounds.0 = 2.5: input should be a valid integer"),
        ("compare.tuning_rounds=[3, 0]", "compare.tuning_rounds.1 = 0: input should be greater than"),
        ("compare.tuning_rounds=[3, 3]", "compare.tuning_rounds = [3, 3]: must be a number, or a list of growing"),
        ("compare.tuning_rounds=[]", "compare.tuning_rounds = []: must be a number, or a list of growing numbers"),
        ("compare.tuning_rounds=[3, 13]", "a list of growing numbers, at most train.rounds = 8"),
        ("compare.tuning_rounds=13", "growing numbers, at most train.rounds = 8"),
    ],
)
def test_what_cannot_be_tried_is_said_before_anything_runs(here, capsys, setting, said):
    assert call(*command("c", "compare.algorithms=['fedlamb']", setting)) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1
    assert not (here / "c").exists()


SHORT = ("compare.algorithms=['fedavg']", "compare.tuning_rounds=4")


def untimed(folder):
    """The rounds of a run without their times."""
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows(folder)]


def test_settings_are_chosen_in_fewer_rounds(here, capsys):
    """The slow rate is ahead in the first rounds, the fast one at the end."""
    rates = ("compare.grid.fedavg.lr=[0.02, 0.5]", "train.rounds=12", "train.seed=2")
    assert call(*command("whole", SHORT[0], *rates)) == 0
    assert call(*[word for word in command("c", *SHORT, *rates) if word != "--quiet"]) == 0
    for name in ("tuning/fedavg/lr0.02", "tuning/fedavg/lr0.5"):
        assert read_record(Path("c", name)).complete
        assert len(rows(Path("c", name))) == 4
        assert untimed(Path("c", name)) == untimed(Path("whole", name))[:4]
    assert [len(rows(f"c/fedavg/seed{seed}")) for seed in (2, 3)] == [12, 12]
    assert [read_record(f"{folder}/fedavg/seed2").lr for folder in ("c", "whole")] == [0.02, 0.5]
    assert "held out, in the first 4 rounds\n" in capsys.readouterr().out
    assert json.loads(Path("c/config.json").read_text())["compare"]["tuning_rounds"] == [4]
    assert call(*[word for word in command("whole", SHORT[0], *rates) if word != "--quiet"]) == 0
    assert "in the first" not in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["cosine", "{name='milestones', at=[3, 6]}"])
def test_tuning_runs_have_the_rates_of_the_final_ones(here, schedule):
    """A cosine ends with the final runs, not with these."""
    assert call(*command("c", *SHORT, f"train.schedule={schedule}")) == 0
    final = read_record("c/fedavg/seed0")
    rates = [row["lr"] for row in rows(f"c/tuning/fedavg/lr{final.lr:g}")]
    assert rates == [row["lr"] for row in rows("c/fedavg/seed0")][:4]
    if schedule == "cosine":  # half a cosine over the final rounds
        assert rates == pytest.approx([final.lr * (1 + math.cos(math.pi * done / ROUNDS)) / 2 for done in range(4)])
    assert call(*command("c", *SHORT, f"train.schedule={schedule}")) == 0  # the same runs: nothing is refused


@pytest.mark.long
def test_short_tuning_runs_continue_and_are_never_mixed(here, monkeypatch, capsys):
    record, seen = Training.record, []

    def counted(self, *arguments, **options):
        seen.append(1)
        if len(seen) == 2 * 2 + 1:  # two rounds of both rates, then the third
            os.kill(os.getpid(), signal.SIGINT)
        return record(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "record", counted)
        assert call(*command("c", *SHORT)) == 130
    assert [len(rows(Path("c", name))) for name in RUNS[:2]] == [3, 3]
    assert call(*command("c", *SHORT)) == 0
    assert call(*command("whole", *SHORT)) == 0
    assert_same_comparison("whole", "c", RUNS[:4])
    with monkeypatch.context() as patch:
        patch.setattr(Training, "record", None)
        assert call(*command("c", *SHORT)) == 0  # complete: nothing is trained
    capsys.readouterr()
    assert call(*command("c", *SHORT, "compare.tuning_rounds=3")) == 2
    said = capsys.readouterr().err
    assert "tuning/fedavg/lr0.05' holds another run: train.rounds = 4 (now 3)" in said
    assert said.count("\n") == 1
    assert call(*command("c", *SHORT, "compare.tuning_rounds=6")) == 0  # more are added
    assert call(*command("longer", *SHORT, "compare.tuning_rounds=6")) == 0
    assert_same_comparison("longer", "c", RUNS[:4])


STAGES = (
    "compare.algorithms=['fedavg']",
    "compare.tuning_rounds=[2, 5]",
    "compare.grid.fedavg.lr=[0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 1e30]",
)
CONTINUED = 7  # of the combinations, to the end


@pytest.mark.long
def test_the_best_third_and_the_neighbours_of_the_best_continue(here, capsys):
    """Rate 0.2 is best after five rounds, but not among the best third after two."""
    assert call(*command("whole", STAGES[0], STAGES[2], "compare.tuning_rounds=5")) == 0
    assert call(*[word for word in command("c", *STAGES) if word != "--quiet"]) == 0
    said = capsys.readouterr().out
    with Path("c/tuning.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    folders = [folder_name({"lr": float(line["learning_rate"])}) for line in table]  # in the order of the grid
    made = {name: rows(Path("c/tuning/fedavg", name)) for name in folders}
    whole = {name: rows(Path("whole/tuning/fedavg", name)) for name in folders}
    after_two = {name: own[1]["accuracy"] if len(own) > 1 else -1 for name, own in whole.items()}
    third = sorted(folders, key=lambda name: -after_two[name])[:4]  # of 10; of equals the first
    assert set(third) == {"lr0.001", "lr0.01", "lr0.02", "lr0.5"}
    continued = {name for name in folders if len(made[name]) == 5}
    assert {*third, "lr0.1", "lr0.2"} <= continued  # the neighbours of the best one are 0.1 and 0.5
    assert len(continued) == CONTINUED
    for name in folders:
        expected = whole[name][: 5 if name in continued else 2]
        assert [row["accuracy"] for row in made[name]] == [row["accuracy"] for row in expected]
    assert [int(line["rounds"]) for line in table] == [len(made[name]) for name in folders]
    (chosen,) = [line for line in table if line["chosen"] == "True"]
    assert chosen["learning_rate"] == "0.2"
    best = max(own[4]["accuracy"] for own in whole.values() if own)
    assert float(chosen["final_validation_accuracy"]) == best
    assert "chosen on 20% of the training data, held out, in the first 5 rounds\n" in said
    assert (
        "the best third of what was tried continued after 2 rounds (at least 3); all neighbours of the chosen" in said
    )
    (tuned,) = [response for response in responses(find_records(["c"])) if response.on == "validation"]
    assert len(tuned.tried) == 10  # one curve for all stages, so that an edge is one of all that was tried
    assert tuned.chosen == float(chosen["learning_rate"])


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """The folder of a comparison in stages that nothing interrupted, and the names of its runs with a model."""
    place = tmp_path_factory.mktemp("staged")
    with contextlib.chdir(place), pytest.MonkeyPatch.context() as patch:
        Path("small.toml").write_text(TOML)
        skip_pictures(patch)
        assert call(*command("whole", *STAGES)) == 0
    ended = (path.parent.name for path in (place / "whole" / "tuning" / "fedavg").glob("*/model.safetensors"))
    names = sorted(f"tuning/fedavg/{name}" for name in ended)
    assert len(names) == 9  # the tenth has diverged
    return place / "whole", [*names, "fedavg/seed0", "fedavg/seed1"]


@pytest.mark.long
@pytest.mark.parametrize("stop_at", [2, 5], ids=["second-stage", "neighbour"])
def test_stages_resume_after_a_stop(here, staged, monkeypatch, stop_at):
    record, seen = Training.record, []

    def counted(self, *arguments, **options):
        seen.append(self.state.round)
        if seen.count(4) == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return record(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "record", counted)
        assert call(*command("c", *STAGES)) == 130
    lengths = [len(rows(path)) for path in Path("c/tuning/fedavg").iterdir()]
    assert (lengths.count(4), lengths.count(5)) == ((4, 0) if stop_at == 2 else (2, 4))
    assert call(*command("c", *STAGES)) == 0
    whole, names = staged
    assert_same_comparison(whole, "c", names)


@pytest.mark.long
def test_stages_can_start_again(here, staged, monkeypatch):
    record, seen = Training.record, []
    whole, names = staged
    shutil.copytree(whole, "c")
    with monkeypatch.context() as patch:
        patch.setattr(Training, "record", lambda self, *rest: seen.append(1) or record(self, *rest))
        assert call(*command("c", *STAGES), "--overwrite") == 0
    assert len(seen) == 9 * 2 + CONTINUED * 3 + 2 * ROUNDS  # no round twice: nine of two rounds, some go on, two seeds
    assert_same_comparison(whole, "c", names)
    with monkeypatch.context() as patch:
        patch.setattr(Training, "record", None)
        assert call(*command("c", *STAGES)) == 0  # complete: nothing is trained


RATES = [0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5]
RESPONSES = {  # accuracies after the rounds of each stage
    # Fed-LAMB in lamb-mnist-mlp-noniid-e3, where 0.01 starts below its neighbours on both sides; its last value is
    # that of lamb-mnist-mlp-noniid-e3-rate, and where no record goes so far, values are made up
    "as-in-the-panel": {
        2: [0.686, 0.869, 0.869, 0.778, 0.879, 0.678, 0.217, 0.178, 0.103],
        4: [0.793, 0.896, 0.893, 0.854, 0.886, 0.780, 0.300, 0.200, 0.110],
        8: [0.940, 0.961, 0.969, 0.980, 0.942, 0.895, 0.600, 0.300, 0.120],
    },
    # the larger a rate, the faster its start and the lower its end
    "slow-wins-late": {
        2: [0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50],
        4: [0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50, 0.51],
        8: [0.80, 0.90, 0.85, 0.80, 0.75, 0.70, 0.65, 0.60, 0.55],
    },
    # all rates that continue diverge: the best of the others has to be run to the end, too
    "the-fast-diverge": {
        2: [0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50],
        4: [0.15, 0.20, 0.30, 0.25, 0.30, 0.35, math.inf, math.inf, math.inf],
        8: [0.50, 0.70, 0.80, 0.75, 0.70, 0.40, math.inf, math.inf, math.inf],
    },
}
STAGED = ("compare.algorithms=['fedavg']", "compare.seeds=1", "compare.tuning_rounds=[2, 4, 8]", "compare.select=test",
          f"compare.grid.fedavg.lr={RATES}")  # fmt: skip


RECORD = Training.record


def respond(patch, response):
    """Replace what runs are evaluated to; return a list that grows with every round of a run."""
    seen = []

    def replaced(self, before, plan, report, seconds, metrics):
        number, lr = len(self.history) + 1, self.protocol.lr
        seen.append((lr, number))
        value = response[min(stage for stage in response if stage >= number)][RATES.index(lr)]
        changed = {"loss": math.inf} if math.isinf(value) else {"accuracy": value}
        return RECORD(self, before, plan, report, seconds, {**metrics, **changed})

    patch.setattr(Training, "record", replaced)
    return seen


def tuned(folder):
    with Path(folder, "tuning.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    (chosen,) = [float(line["learning_rate"]) for line in table if line["chosen"] == "True"]
    return chosen, {float(line["learning_rate"]): int(line["rounds"]) for line in table}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "slow-wins-late" else ()) for name in RESPONSES]
)
def test_a_rate_that_wins_late_is_found(here, monkeypatch, name):
    response = RESPONSES[name]
    seen = respond(monkeypatch, response)
    assert call(*command("c", *STAGED)) == 0
    last = [-1 if math.isinf(value) else value for value in response[8]]
    place = last.index(max(last))
    chosen, rounds = tuned("c")
    assert chosen == RATES[place]
    assert all(rounds[lr] == 8 for lr in RATES[place - 1 : place + 2])  # it was compared with its neighbours
    tuning = seen[:-8]  # then one final run
    assert len(tuning) == len(set(tuning)) <= 8 * len(RATES)  # no round twice, and never more than the whole grid
    if name == "as-in-the-panel":
        assert (rounds, len(tuning)) == (dict(zip(RATES, [2, 8, 8, 8, 8, 2, 2, 2, 2], strict=True)), 4 * 8 + 5 * 2)


@pytest.mark.long
def test_folders_of_comparisons_that_did_not_try_neighbours(here, monkeypatch, capsys):
    """Earlier versions chose among the best third only."""
    with monkeypatch.context() as patch:
        patch.setattr(comparing, "neighbours", lambda grid, point: [])
        respond(patch, RESPONSES["as-in-the-panel"])
        assert call(*command("c", *STAGED)) == 0
        assert tuned("c")[0] == 0.005
        right = RESPONSES["as-in-the-panel"] | {8: [0.94, 0.96, 0.98, 0.97, 0.94, 0.9, 0.6, 0.3, 0.1]}
        respond(patch, right)
        assert call(*command("right", *STAGED)) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        respond(patch, RESPONSES["as-in-the-panel"])
        assert call(*command("c", *STAGED)) == 2
    said = capsys.readouterr().err
    assert "fedavg/seed0' holds another run: train.lr = 0.005 (now 0.01); choose another with --out" in said
    assert said.count("\n") == 1
    seen = respond(monkeypatch, right)
    assert call(*command("right", *STAGED)) == 0  # the same choice: only the neighbour is added
    assert seen == [(0.01, number) for number in range(3, 9)]
    assert tuned("right")[0] == 0.005
