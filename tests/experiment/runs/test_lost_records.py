"""Records that disappear, move or are half deleted: noticed, never silently replaced, never taken for complete."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from helpers import Killed, assert_same, call, rows, said_in_one_line, sets, skip_pictures
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.records import REPLACED, find_records, read_record
from lamina.storage.checkpoint import Checkpoints
from lamina.storage.leases import Lease
from leases_of_others import abandon

TOML = """
[data]
clients = 6
partition = { name = "classes", k = 2 }

[model]
name = "mlp"
hidden = 4

[train]
rounds = 4
participation = 0.5
batch_size = 128
lr = 0.02

[compare]
algorithms = ["fedavg"]
seeds = 2
target = 0.3
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two folders: a run of four rounds, and one of three that has another to go."""
    place = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(place):
        Path("small.toml").write_text(TOML)
        assert call(*command("whole")) == 0
        assert call(*command("part", "train.rounds=3")) == 0
        Path("part/model.safetensors").unlink()
    return place


@pytest.fixture
def here(empty_folder, finished, monkeypatch):
    shutil.copytree(finished, empty_folder, dirs_exist_ok=True)
    skip_pictures(monkeypatch)
    return empty_folder


def command(out, *more):
    return ["run", "small.toml", "--out", str(out), "--quiet", *sets("algorithm.name=scaffold", *more)]


def compare(*more, out="c"):
    return ["compare", "small.toml", "--out", out, "--quiet", *sets("train.rounds=2", *more)]


def snapshot(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file() and path.name != "lease"}


# --- a folder that changes while a run writes to it --------------------------------------------------------------


def empty(folder):
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_by_another(folder):
    folder.rename("moved")
    shutil.copytree("whole", folder)


CHANGES = [
    empty,
    shutil.rmtree,
    replace_by_another,
    lambda folder: folder.rename("moved"),
    lambda folder: (folder / "metrics.jsonl").unlink(),
    lambda folder: (folder / "config.json").unlink(),
]


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", ["record", "checkpoint", "finish"])
def test_a_folder_that_changes_during_the_run_ends_it(here, capsys, monkeypatch, change, moment):
    method, others = getattr(RunFolder, moment), []

    def disturbed(self, *arguments):
        if moment == "finish" or len(rows(self.path) if (self.path / "metrics.jsonl").exists() else []) == 2:
            change(self.path)
            others.append(snapshot("r") if Path("r").exists() else {})
        method(self, *arguments)

    monkeypatch.setattr(RunFolder, moment, disturbed)
    assert call(*command("r")) == 2
    said = said_in_one_line(capsys)
    assert "the folder 'r' was removed, emptied or replaced, or continued by another process, while" in said
    assert (snapshot("r") if Path("r").exists() else {}) == others[0]  # nothing was written to what is there now
    assert not (Path("moved") / "model.safetensors").exists()


def test_an_overwriting_run_does_not_replace_a_run_that_came_in_between(here, capsys, monkeypatch):
    """With --overwrite the old run is deleted when the first round is finished."""
    begin = RunFolder.begin

    def late(self):
        if not Path("moved").exists():
            replace_by_another(self.path)
        begin(self)

    monkeypatch.setattr(RunFolder, "begin", late)
    assert call(*command("part"), "--overwrite") == 2
    assert "was removed, emptied or replaced" in said_in_one_line(capsys)
    assert_same("part", "whole")


def test_checkpoints_deleted_during_the_run_are_written_again(here, monkeypatch):
    """The next checkpoint names no file that is gone."""
    save = Checkpoints.save

    def disturbed(self, state, *more):
        if state.round == 3:
            shutil.rmtree(self.folder)
        save(self, state, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", disturbed)
        assert call(*command("r", "train.rounds=3")) == 0
    assert call(*command("r")) == 0
    assert_same("whole", "r")
    assert "resuming after round 3" in Path("r/log.txt").read_text()


def test_a_comparison_notices_that_its_folder_was_replaced(here, capsys, monkeypatch):
    assert call(*compare(out="other")) == 0
    finish = RunFolder.finish

    def disturbed(self, *arguments):
        finish(self, *arguments)
        if self.path.parts[-2:] == ("fedavg", "seed0"):
            Path("c").rename("moved")
            shutil.copytree("other", "c")

    monkeypatch.setattr(RunFolder, "finish", disturbed)
    other = snapshot("other")
    assert call(*compare("compare.algorithms=['fedavg', 'scaffold']", "compare.seeds=1")) == 2
    assert "the folder 'c' was removed, emptied or replaced" in said_in_one_line(capsys)
    assert {name.removeprefix("c/"): data for name, data in snapshot("c").items()} == {
        name.removeprefix("other/"): data for name, data in other.items()
    }


@pytest.mark.parametrize("kind", ["compare", "tune"])
def test_finished_runs_that_disappear_are_no_success(here, capsys, monkeypatch, kind):
    finish = RunFolder.finish

    def disturbed(self, *arguments):
        finish(self, *arguments)
        shutil.rmtree(self.path)

    monkeypatch.setattr(RunFolder, "finish", disturbed)
    arguments = compare() if kind == "compare" else [
        "tune", "small.toml", "--out", "c", "--quiet", *sets("train.rounds=2", "tune.grid.train.lr=[0.01, 0.1]")
    ]  # fmt: skip
    assert call(*arguments) == 2
    assert "c/" in said_in_one_line(capsys)


# --- checkpoints that are missing --------------------------------------------------------------------------------


@pytest.mark.parametrize("remove", [shutil.rmtree, empty])
@pytest.mark.parametrize(("name", "rounds"), [("part", 4), ("whole", 6)])
def test_finished_rounds_without_a_checkpoint_are_not_thrown_away(here, capsys, remove, name, rounds):
    remove(here / name / "checkpoints")
    before = snapshot(name)
    assert call(*command(name, f"train.rounds={rounds}")) == 2
    said = said_in_one_line(capsys)
    assert f"has {rounds - 1 if name == 'part' else 4} finished rounds but no sound checkpoint to resume from" in said
    assert "--overwrite" in said
    assert snapshot(name) == before
    assert call(*command(name), "--overwrite") == 0
    assert_same("whole", name)


def test_a_complete_run_needs_no_checkpoint(here):
    shutil.rmtree("whole/checkpoints")
    assert call(*command("whole")) == 0


def test_rounds_before_the_first_checkpoint_are_run_again_with_a_warning(here, capsys, monkeypatch):
    def dying(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", dying)
        with pytest.raises(Killed):
            call(*command("r", "run.checkpoint_every=3"))
    assert len(rows("r")) == 3
    assert call(*command("r", "run.checkpoint_every=3")) == 0
    assert "r: there is no checkpoint yet: 3 finished rounds are run again" in said_in_one_line(capsys)
    assert_same("whole", "r")


@pytest.mark.parametrize(
    "stray", ["round-abc.json", "round-.json", "round--1.json", "round-3.json", "round-٣٣٣٣٣٣.json", "notes.txt"]
)
def test_stray_files_among_the_checkpoints_are_ignored(here, capsys, stray):
    (here / "part" / "checkpoints" / stray).write_text("{}")
    (here / "part" / "checkpoints" / "round-000009.json").mkdir()
    assert call("watch", "part", "--once") == 0
    assert call(*command("part")) == 0
    assert capsys.readouterr().err == ""
    assert_same("whole", "part")
    assert (here / "part" / "checkpoints" / stray).exists()


# --- replacing -----------------------------------------------------------------------------------------------------


def killed_deletions(monkeypatch, act):
    """Kill a command at its first deletion, its second, and so on; whatever is left is looked at by `act`."""
    unlink, rmtree, moment = Path.unlink, shutil.rmtree, 0
    while True:
        left = [moment]

        def counted(delete, left=left):
            def deleting(path, *arguments, **options):
                existed = os.path.lexists(path)
                left[0] -= existed
                if left[0] < 0:
                    raise Killed
                delete(path, *arguments, **options)

            return deleting

        with monkeypatch.context() as patch:
            patch.setattr(Lease, "release", abandon)  # a kill releases nothing
            patch.setattr(Path, "unlink", counted(unlink))
            patch.setattr(shutil, "rmtree", counted(rmtree))
            try:
                act(False)
                return moment
            except Killed:
                pass
        act(True)
        moment += 1


@pytest.mark.long
def test_an_overwrite_that_is_killed_leaves_nothing_that_looks_complete(here, monkeypatch):
    shutil.copytree("whole", "undisturbed")

    def act(killed):
        if not killed:
            shutil.copytree("undisturbed", "r", dirs_exist_ok=True)
            call(*command("r"), "--overwrite")
            return
        if any(record.complete for record in find_records(["."]) if record.folder.name == "r"):
            assert Path("r/best.safetensors").exists()
            assert Path("r/environment.json").exists()
            assert Checkpoints(Path("r/checkpoints")).rounds()
        assert call(*command("r")) == 0
        assert_same("undisturbed", "r")

    assert killed_deletions(monkeypatch, act) > 5


def test_what_a_killed_overwrite_leaves_of_a_diverged_run_can_be_replaced(here, monkeypatch):
    wild = compare("train.schedule={name='exponential', gamma=1e30}", "compare.seeds=1")
    assert call(*wild) == 3
    Path("c/fedavg/seed0/metrics.jsonl").unlink()
    Path("c/fedavg/seed0", REPLACED).touch()
    assert call(*wild) == 3
    assert not Path("c/fedavg/seed0", REPLACED).exists()
    assert read_record("c/fedavg/seed0").diverged


def test_an_overwriting_comparison_keeps_no_earlier_run(here, capsys):
    tuned = "compare.grid.fedavg.lr=[0.01, 0.1]"
    assert call(*compare(tuned, "compare.algorithms=['fedavg', 'scaffold']", "compare.seeds=3")) == 0
    assert call(*compare("train.lr=0.05", "compare.seeds=1"), "--overwrite") == 0
    assert [record.folder for record in find_records(["c"])] == [(here / "c" / "fedavg" / "seed0").resolve()]
    assert call("report", "c", "--out", "page.html") == 0
    assert "1 curve from 1 run " in Path("page.html").read_text()


@pytest.mark.long
def test_an_overwriting_comparison_that_is_killed_leaves_nothing_old(here, monkeypatch):
    both = "compare.algorithms=['fedavg', 'scaffold']"
    assert call(*compare(both)) == 0
    old = read_record("c/scaffold/seed1").environment["started"]

    def dying(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "record", dying)
        with pytest.raises(Killed):
            call(*compare(both), "--overwrite")
    assert not list(Path("c").rglob("model.safetensors"))
    assert call(*compare(both)) == 0
    assert len(find_records(["c"])) == 4
    assert old


def test_an_overwriting_comparison_refuses_foreign_files_before_it_deletes(here, capsys):
    assert call(*compare()) == 0
    Path("c/fedavg/seed1/thesis.txt").write_text("years of work")
    before = snapshot("c")
    assert call(*compare("compare.seeds=1"), "--overwrite") == 2
    assert "thesis.txt" in said_in_one_line(capsys)
    assert snapshot("c") == before


def test_an_overwriting_tuning_keeps_no_earlier_run(here):
    tune = ["tune", "small.toml", "--out", "t", "--quiet", *sets("train.rounds=1", "tune.seeds=2")]
    assert call(*tune, *sets("tune.grid.train.lr=[0.01, 0.1]")) == 0
    assert call(*tune, *sets("tune.grid.train.lr=[0.01]", "tune.seeds=1"), "--overwrite") == 0
    assert len(find_records(["t"])) == 1


# --- every run diverged ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["compare", "tune"])
def test_runs_that_all_diverged_are_no_success(here, capsys, kind):
    arguments = compare("train.lr=1e38", "compare.seeds=1") if kind == "compare" else [
        "tune", "small.toml", "--out", "t", "--quiet", *sets("train.rounds=2", "tune.grid.train.lr=[1e37, 1e38]")
    ]  # fmt: skip
    assert call(*arguments) == 3
    assert "every run diverged" in said_in_one_line(capsys)


def test_one_run_that_did_not_diverge_is_a_success(here):
    rates = ("compare.grid.fedavg.lr=[1e38]", "compare.grid.scaffold.lr=[0.01]")
    assert call(*compare("compare.algorithms=['fedavg', 'scaffold']", "compare.seeds=1", *rates)) == 0


# --- damaged descriptions ----------------------------------------------------------------------------------------


LINES = [
    "5",
    '"x"',
    "[1]",
    "null",
    '{"round": 4, "accuracy": "high"}',
    '{"round": 4, "loss": [1]}',
    '{"round": true}',
    '{"round": 4, "loss": true}',
    '{"round": 4, "loss": 1e999}',
    '{"round": 4, "loss": NaN}',
    '{"round": 4, "loss": 1' + "0" * 400 + "}",
    "[" * 100_000,
]


@pytest.mark.long
@pytest.mark.parametrize("line", LINES)
def test_a_metrics_line_that_is_not_a_row_of_numbers_is_damage(here, capsys, line):
    shutil.rmtree("whole")
    with Path("part/metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert len(read_record("part").history) == 3
    for reader in (("export", "part"), ("watch", "part", "--once"), ("report", "part", "--out", "page.html")):
        assert call(*reader) == 0
    assert capsys.readouterr().err == ""
    assert call(*command("part")) == 0
    assert "part/metrics.jsonl is missing or damaged after round 3" in said_in_one_line(capsys)


def test_a_damaged_config_in_a_comparison_is_one_line(here, capsys):
    staged = ("compare.seeds=1", "compare.grid.fedavg.lr=[0.01, 0.1]", "compare.tuning_rounds=1")
    assert call(*compare(*staged)) == 0
    path = here / "c" / "tuning" / "fedavg" / "lr0.01" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "train": [1]}))
    assert call(*compare(*staged)) == 2
    assert "lr0.01" in said_in_one_line(capsys)


@pytest.mark.parametrize("kind", ["run", "compare", "tune"])
def test_a_link_to_nothing_as_the_folder_is_one_line(here, capsys, kind):
    Path("link").symlink_to("nowhere")
    more = sets("tune.grid.train.lr=[0.01]", "train.rounds=1")
    assert call(kind, "small.toml", "--out", "link", "--quiet", *more) == 2
    assert "cannot write to the folder 'link': No such file or directory" in said_in_one_line(capsys)
    assert not Path("nowhere").exists()
