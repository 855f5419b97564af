"""A run that is killed, at any moment, ends as if nothing had happened."""

import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import lamina
from helpers import HELD_UP, Killed, assert_same, call, finish, rows, sets, start, without_times
from lamina import BadInput
from lamina.algorithms.contract import Model
from lamina.engines.state import State
from lamina.experiment import build as building
from lamina.experiment import folder as run_folder
from lamina.experiment import run as running
from lamina.experiment.config import load
from lamina.experiment.environment import environment, git_commit, own_commit
from lamina.experiment.folder import RunFolder
from lamina.experiment.records import read_metrics, read_record
from lamina.ledger import Ledger
from lamina.storage import checkpoint, files
from lamina.storage.checkpoint import Checkpoints, load_newest, pack, unpack
from lamina.storage.locks import Lock

TOML = """
[data]
clients = 8
partition = { name = "classes", k = 2 }

[model]
name = "mlp"
hidden = 6

[train]
rounds = 40
participation = 0.4
batch_size = 64
lr = 0.02
"""


@pytest.fixture
def here(empty_folder):
    Path("small.toml").write_text(TOML)
    return empty_folder


def command(out, *more, rounds=40, algorithm="scaffold", engine="stacked"):
    settings = (f"train.rounds={rounds}", f"algorithm.name={algorithm}", f"run.engine={engine}", *more)
    return ["run", str(Path("small.toml").resolve()), "--out", str(Path(out).resolve()), "--quiet",
            *sets(*settings)]  # fmt: skip


def wait_for_a_round(path, process):
    """Wait until a run has one finished round more than now, or has ended."""
    metrics, before = path / "metrics.jsonl", None
    deadline = time.monotonic() + HELD_UP
    while process.is_alive() and time.monotonic() < deadline:
        size = metrics.stat().st_size if metrics.exists() else 0
        before = size if before is None or size < before else before  # cut back when it goes on
        if size > before:
            return
        time.sleep(0.001)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("algorithm", ["scaffold", "fedlamb", "mimelamb"])
def test_killed_at_random_moments(here, algorithm, engine):
    undisturbed, disturbed = (command(name, algorithm=algorithm, engine=engine) for name in ("a", "b"))
    assert finish(undisturbed) == 0
    moments = random.Random(f"{algorithm} {engine}")
    for kill in range(5):
        process = start(disturbed)
        if kill % 5 != 2:  # one of five may be hit before it has done anything
            wait_for_a_round(here / "b", process)
        time.sleep(moments.uniform(0, 0.03))
        process.kill()
        process.join(HELD_UP)
        assert process.exitcode == -signal.SIGKILL, "the run ended before it was killed: give it more rounds"
    assert 0 < len(rows_so_far(here / "b")) < 40
    assert finish(disturbed) == 0
    assert_same("a", "b")


def rows_so_far(path):
    return read_metrics(path / "metrics.jsonl")[0]


def test_killed_at_every_write(here, monkeypatch):
    """Every call that makes something durable is the last one, in turn."""
    quick = {"rounds": 2, "algorithm": "fedlamb"}
    assert call(*command("a", **quick)) == 0
    sync, moment = os.fsync, 0
    while True:
        left = [moment]

        def counted(handle, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            sync(handle)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", counted)
            patch.setattr(Lock, "release", lambda self, delete: self._file.close())  # a kill deletes nothing
            try:
                call(*command("b", **quick))
                break
            except Killed:
                pass
        assert call(*command("b", **quick)) == 0
        assert_same("a", "b")
        shutil.rmtree("b")
        moment += 3 if moment > 12 else 1  # after the first round they repeat
    assert moment > 18


def test_a_second_process_is_refused_and_told_who_the_first_is(half, capsys):
    lock = Lock(half)
    assert call(*command(half, rounds=6)) == 2
    said = capsys.readouterr().err
    assert f"process {os.getpid()} is writing to the folder" in said
    assert len(said.splitlines()) == 1
    lock.release()
    assert call(*command(half, rounds=6)) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_round(half, monkeypatch, number):
    run_round = lamina.Simulation.run_round

    def interrupted(self, **options):
        if self.state.round == 1:  # in the second round
            os.kill(os.getpid(), number)
        return run_round(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(lamina.Simulation, "run_round", interrupted)
        assert call(*command("b", "run.checkpoint_every=1000", rounds=6)) == 130  # it is saved when it stops
    assert len(rows("b")) == Checkpoints(Path("b/checkpoints")).rounds()[-1] == 2
    assert "stopped after round 2" in Path("b/log.txt").read_text()
    assert call(*command("b", rounds=6)) == 0
    assert_same("whole", "b")


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """Two folders: a run of six rounds, and one stopped after four with something left to do."""
    place, before = tmp_path_factory.mktemp("halfway"), Path.cwd()
    os.chdir(place)
    try:
        Path("small.toml").write_text(TOML)
        assert call(*command("whole", rounds=6)) == 0
        assert call(*command("half", rounds=4)) == 0
        (place / "half" / "model.safetensors").unlink()
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def half(here, halfway):
    shutil.copytree(halfway / "half", here / "half")
    shutil.copytree(halfway / "whole", here / "whole")
    return here / "half"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("file", ["state-000004-*", "clients-000004-*", "round-000004.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(half, capsys, file, damage):
    (path,) = (half / "checkpoints").glob(file)
    damage(path)
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)
    said = capsys.readouterr().err
    if file != "round-000004.json" or damage is not Path.unlink:  # without its manifest there is no checkpoint
        assert len(said.splitlines()) == 1
        assert "the checkpoint of round 4 is damaged and not used" in said
        assert path.name in said
    log = (half / "log.txt").read_text()
    assert "going on after round 3" in log


def test_without_a_sound_checkpoint_it_starts_again(half, capsys):
    for path in (half / "checkpoints").glob("state-*"):
        truncate(path)
    assert call(*command(half, rounds=6)) == 0
    assert capsys.readouterr().err.count("is damaged and not used") == 2
    assert_same("whole", half)


@pytest.mark.parametrize("tail", ['{"round": 5, "accuracy": 0.1}\n', '{"round": 5, "accu', "\x00\x00"])
def test_metrics_beyond_the_checkpoint_are_cut_back(half, tail):
    with (half / "metrics.jsonl").open("a") as file:
        file.write(tail)
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)


def test_missing_metrics_are_run_again(half):
    """A power failure may keep a checkpoint and lose the end of the metrics."""
    metrics = half / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)


def damage_line_2(metrics):
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + "garbage{\n" + "".join(lines[2:]))


def delete_line_2(metrics):
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + "".join(lines[2:]))


def damage_line_1(metrics):
    metrics.write_text("garbage\n" + "".join(metrics.read_text().splitlines(keepends=True)[1:]))


DAMAGES = [damage_line_1, damage_line_2, delete_line_2, Path.unlink, lambda metrics: metrics.write_text("")]


@pytest.mark.parametrize("name", ["half", "whole"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metrics_do_not_make_the_folder_free(half, capsys, damage, name):
    """Another configuration would have replaced checkpoints and model, without a word."""
    place = half.parent / name
    damage(place / "metrics.jsonl")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "lock"}
    assert call(*command(place, "train.lr=0.5", rounds=6)) == 2
    assert "holds another run: train.lr = 0.02 (now 0.5)" in capsys.readouterr().err
    assert call(*command(place, rounds=3)) == 2  # fewer rounds than were trained
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "lock"} == before


def test_a_model_alone_does_not_make_the_folder_free(half, capsys):
    """Not even one that cannot be read: somebody trained it."""
    whole = half.parent / "whole"
    shutil.rmtree(whole / "checkpoints")
    (whole / "metrics.jsonl").unlink()
    for damage in (lambda path: None, truncate):
        damage(whole / "model.safetensors")
        assert call(*command(whole, "train.lr=0.5", rounds=6)) == 2
        assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["half", "whole"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metrics_are_named_and_run_again(half, capsys, damage, name):
    """A complete run, too, which no command may call complete any more."""
    place = half.parent / name
    shutil.copytree(half.parent / "whole", half.parent / "undisturbed")
    damage(place / "metrics.jsonl")
    if (place / "metrics.jsonl").exists():
        assert not read_record(place).complete
    assert call(*command(place, rounds=6)) == 0
    said = capsys.readouterr().err
    line = {damage_line_1: "line 1 of", damage_line_2: "line 2 of", delete_line_2: "line 2 of"}.get(damage, "has 0 of ")
    assert len(said.splitlines()) == 1
    assert line in said
    assert "metrics.jsonl" in said
    assert "going on after round 0, what came later is run again" in said
    assert_same("undisturbed", place)
    assert read_record(place).complete
    assert call(*command(place, rounds=6)) == 0  # and once is enough
    assert capsys.readouterr().err == ""


def test_lost_metrics_are_named_only_once_though_the_run_is_killed_again(half, capsys, monkeypatch):
    whole = half.parent / "whole"
    damage_line_2(whole / "metrics.jsonl")
    save, left = Checkpoints.save, [3]

    def dying(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        save(*arguments)

    monkeypatch.setattr(Checkpoints, "save", dying)
    with pytest.raises(Killed):
        call(*command(whole, rounds=6))
    assert "line 2 of" in capsys.readouterr().err
    left[0] = 99
    assert call(*command(whole, rounds=6)) == 0
    assert capsys.readouterr().err == ""
    assert read_record(whole).complete


def test_a_model_cut_short_is_written_again(half, capsys):
    whole = half.parent / "whole"
    model = (whole / "model.safetensors").read_bytes()
    truncate(whole / "model.safetensors")
    assert call(*[word for word in command(whole, rounds=6) if word != "--quiet"]) == 0
    assert "is complete" not in capsys.readouterr().out
    assert (whole / "model.safetensors").read_bytes() == model


def test_what_is_lost_of_the_environment_does_not_stop_a_run(half, capsys):
    for text in (None, "{", "[]"):
        place = half.parent / f"copy{text}"
        shutil.copytree(half, place)
        (place / "environment.json").unlink()
        if text:
            (place / "environment.json").write_text(text)
        assert call(*command(place, rounds=6)) == 0
        assert "environment.json was lost or damaged" in capsys.readouterr().err
        assert read_record(place).environment["torch"] == torch.__version__
        assert_same("whole", place)


def test_damaged_descriptions_are_one_line(half, capsys):
    (half / "diverged.json").write_text("{}")
    assert call(*command(half, rounds=6)) == 3
    assert capsys.readouterr().err == "diverged: the training diverged, and diverged.json does not say how\n"
    (half / "diverged.json").unlink()
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "format": "x"}))
    assert call(*command(half, rounds=6)) == 2
    assert "was written by another lamina (format x, this one's is 1)" in capsys.readouterr().err
    (half / "config.json").write_text("{")
    assert call(*command(half, rounds=6)) == 2
    said = capsys.readouterr().err
    assert "holds a config.json that cannot be read" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("reader", [("report", "half"), ("export", "half"), ("watch", "half", "--once")])
def test_a_folder_of_another_format_is_not_read_as_if_it_were_ours(half, capsys, reader):
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "format": 0}))
    assert call(*reader) == 2
    said = capsys.readouterr().err
    assert "was written by an older lamina (format 0, this one's is 1)" in said
    assert said.count("\n") == 1


def test_the_log_tells_a_run_from_its_start(half):
    whole = half.parent / "whole"
    (line,) = [line for line in (whole / "log.txt").read_text().splitlines() if "rounds, stacked on" in line]
    assert "scaffold on digits, 8 clients, mlp, lr 0.02, seed 0, 6 rounds, stacked on cpu" in line
    assert call(*command(half, rounds=6)) == 0
    assert "going on after round 4 of 6" in (half / "log.txt").read_text()


def read_only(monkeypatch, place):
    """As on a file system that is mounted read-only, where root may not write, either."""
    statvfs = os.statvfs

    def mounted(path):
        found = statvfs(path)
        flag = found.f_flag | (os.ST_RDONLY if Path(path).resolve().is_relative_to(place.resolve()) else 0)
        return os.statvfs_result([*found[:8], flag, *found[9:]])

    monkeypatch.setattr(os, "statvfs", mounted)
    monkeypatch.setattr(Lock, "__init__", lambda self, path: pytest.fail(f"wrote to {path}"))


def test_a_read_only_file_system_is_called_so_and_a_complete_run_there_is_complete(half, capsys, monkeypatch):
    read_only(monkeypatch, half.parent)
    assert call(*command(half, rounds=6)) == 2
    assert "is on a read-only file system" in capsys.readouterr().err
    assert call(*command("new", rounds=6)) == 2
    assert "is on a read-only file system" in capsys.readouterr().err
    assert call(*[word for word in command("whole", rounds=6) if word != "--quiet"]) == 0
    assert "is complete: 6 rounds" in capsys.readouterr().out
    assert call(*command("whole", "train.lr=0.5", rounds=6)) == 2
    assert "holds another run" in capsys.readouterr().err
    assert call(*command("whole", rounds=6), "--overwrite") == 2
    assert "is on a read-only file system" in capsys.readouterr().err


def test_checkpoints_of_every_third_round(here, capsys):
    assert call(*command("whole", rounds=8)) == 0
    assert call(*command("r", "run.checkpoint_every=3", rounds=8)) == 0
    assert Checkpoints(here / "r" / "checkpoints").rounds() == [6, 8]  # the last round always
    assert_same("whole", "r")


def test_a_folder_of_another_format_is_refused(half, capsys):
    config = json.loads((half / "config.json").read_text())
    for format_, who in ((0, "an older"), (None, "an older"), (99, "a newer")):
        config["format"] = format_
        kept = {key: value for key, value in config.items() if value is not None}
        (half / "config.json").write_text(json.dumps(kept))
        assert call(*command(half, rounds=6)) == 2
        said = capsys.readouterr().err
        assert f"was written by {who} lamina" in said
        assert len(said.splitlines()) == 1
    assert call(*command(half, rounds=6), "--overwrite") == 0
    assert_same("whole", half)


def test_another_config_is_refused_with_the_keys_that_differ(half, capsys):
    before = sorted(path.name for path in half.iterdir())
    assert call(*command(half, "train.lr=0.5", "data.partition.k=3", rounds=6)) == 2
    said = capsys.readouterr().err
    assert "train.lr = 0.02 (now 0.5)" in said
    assert "data.partition.k = 2 (now 3)" in said
    assert said.count(" (now ") == 2
    assert "--out" in said
    assert "--overwrite" in said
    assert call(*command(half, rounds=6, algorithm="fedavg")) == 2
    assert 'algorithm.name = "scaffold" (now "fedavg");' in capsys.readouterr().err  # not its options as well
    assert sorted(path.name for path in half.iterdir()) == before


def test_what_does_not_change_the_result_may_change(half):
    more = ("run.threads=1", "run.checkpoint_every=2", "data.dir=/tmp", "run.device=cpu")
    assert call(*command(half, *more, rounds=6)) == 0
    assert_same("whole", half)


def test_more_rounds_go_on_and_fewer_are_refused(half, capsys):
    assert call(*command("whole", rounds=9)) == 0  # it was complete after six
    assert call(*command(half, rounds=9)) == 0
    assert_same("whole", half)
    assert json.loads((half / "config.json").read_text())["train"]["rounds"] == 9
    assert call(*command(half, rounds=5)) == 2
    assert "train.rounds = 9 (now 5)" in capsys.readouterr().err
    assert call(*command("c", "train.schedule=cosine", rounds=3)) == 0
    assert call(*command("c", "train.schedule=cosine", rounds=4)) == 2  # it would have had other rates
    assert "train.schedule.rounds = 3 (now 4)" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["clients", "state", "round", "best"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(half, capsys, monkeypatch, file):
    write = files.write_file

    def full(path, data):
        if path.name.startswith(file):
            path.with_name(path.name + ".partial").write_bytes(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    with monkeypatch.context() as patch:
        for module in (checkpoint, run_folder):
            patch.setattr(module, "write_file", full)
        if file == "best":  # every round counts as the best so far
            patch.setattr(run_folder.BestModel, "score", property(lambda _: -1.0, lambda *_: None), raising=False)
        assert call(*command(half, rounds=6)) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "No space left on device" in said
    assert "rounds 1 to 4 are kept" in said
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)


@pytest.mark.long
def test_a_file_that_may_not_grow(here):
    """The system cuts the metrics in the middle of a line."""
    plain = {"algorithm": "fedavg", "rounds": 30}
    assert finish(command("a", **plain)) == 0
    assert finish(command("b", **plain), largest_file=4500, errors=here / "said.txt") == 2
    said = (here / "said.txt").read_text()
    assert "File too large" in said
    assert len(said.splitlines()) == 1
    assert not (here / "b" / "metrics.jsonl").read_text().endswith("\n")
    assert finish(command("b", **plain)) == 0
    assert_same("a", "b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_became_read_only(half, capsys):
    half.chmod(0o500)
    assert call(*command(half, rounds=6)) == 2
    assert "cannot write to the folder" in capsys.readouterr().err
    half.chmod(0o700)
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)


def test_a_diverged_run_is_not_run_again(here, capsys):
    wild = command("r", "train.schedule={name='exponential', gamma=1e30}", algorithm="fedavg")
    assert call(*wild) == 3
    said, before = capsys.readouterr().err, rows("r")
    assert 0 < len(before) < 40
    assert call(*wild) == 3
    assert capsys.readouterr().err == said
    assert rows("r") == before


def test_an_infinite_test_loss_is_still_the_end_after_a_kill(here, capsys):
    """Killed after the checkpoint of that round, before it was noted that the run has diverged."""
    experiment = load("small.toml", ["train.rounds=3", "algorithm.name=fedavg"])
    for _ in range(2):
        simulation = building.build(experiment)
        with RunFolder(here / "r", building.resolved(experiment, simulation)) as place:
            if running.go_on([simulation], [place]) == 0:
                row = {**simulation.run_round(), "loss": float("inf")}
                place.record(row, simulation)
                place.checkpoint(simulation)
            else:
                assert not running.train([simulation], [place], experiment)
                assert place.diverged is not None
    assert "test loss" in json.loads((here / "r" / "diverged.json").read_text())["message"]


@pytest.mark.long
def test_several_processes_go_on_together(here):
    """Every rank saves the clients it owns, and all go on from the newest round they share."""

    def torchrun(out, rounds):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        ranks = [start(command(out, rounds=rounds), environment={**place, "RANK": str(rank)}) for rank in range(2)]
        for rank in ranks:
            rank.join(HELD_UP)
        return [rank.exitcode for rank in ranks]

    assert torchrun("a", 8) == [0, 0]
    assert torchrun("b", 5) == [0, 0]
    (newest,) = (here / "b" / "checkpoints" / "rank-1").glob("round-000005.json")
    newest.unlink()  # killed before the second process had saved the fifth round
    assert torchrun("b", 8) == [0, 0]
    assert_same("a", "b")
    assert "going on after round 4" in (here / "b" / "log.txt").read_text()
    assert torchrun("b", 8) == [0, 0]  # complete
    assert call(*command("b", rounds=9)) == 2  # one process does not hold all clients' state


# --- the store of checkpoints, by itself -------------------------------------------------------------------------


class Client(NamedTuple):
    c: torch.Tensor | None
    steps: torch.Tensor | None = None


def state_of(number, clients, size=50):
    return State(number, Model(torch.arange(size) / (number + 1)), {}, clients, Ledger(10))


@pytest.mark.long
def test_ten_thousand_clients_cost_what_changed(tmp_path, monkeypatch):
    """A cohort of 10 writes 10 records, on average fewer than 20 with those that move; disk use stays bounded."""
    clients, size, cohort = 10_000, 50, 10
    written, write = [], checkpoint.write_file

    def counted(path, data):
        if path.name.startswith("clients"):
            written.append(len(data) - 8 - int.from_bytes(data[:8], "little"))
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_file", counted)
    store, draw = Checkpoints(tmp_path), random.Random(0)
    state = state_of(0, {i: Client(torch.full((size,), float(i))) for i in range(clients)}, size)
    store.save(state)
    record = 4 * size
    assert written == [clients * record]
    for number in range(1, 61):
        changed = {i: Client(torch.full((size,), i + number / 100)) for i in draw.sample(range(clients), cohort)}
        state = state_of(number, {**state.clients, **changed}, size)
        store.save(state)
    assert written[1:] == [cohort * record] * 60  # of 10,000 old records hardly any has died
    few = Checkpoints(tmp_path / "few")  # 40 clients, so that records die fast
    state, written[:] = state_of(0, {i: Client(torch.full((size,), float(i))) for i in range(40)}, size), []
    few.save(state)
    for number in range(1, 200):
        changed = {i: Client(torch.full((size,), i + number / 1000)) for i in draw.sample(range(40), cohort)}
        state = state_of(number, {**state.clients, **changed}, size)
        few.save(state)
        on_disk = sum(path.stat().st_size for path in few.folder.glob("clients-*"))
        assert on_disk < 3.5 * 40 * record  # at most half of it dead, for two checkpoints, and headers
    assert cohort * record < sum(written[1:]) / 199 < 2 * cohort * record
    (loaded,) = load_newest([Checkpoints(few.folder)], [(state_of(0, {}, size), Client(None))], few.rounds())
    assert sorted(loaded[0].clients) == list(range(40))
    assert all(torch.equal(loaded[0].clients[i].c, state.clients[i].c) for i in range(40))


def test_only_the_last_two_checkpoints_are_kept_and_all_they_need(tmp_path):
    store = Checkpoints(tmp_path)
    (tmp_path / "thesis.txt").write_text("years of work")
    clients = {}
    for number in range(1, 6):
        clients = {**clients, number: Client(torch.tensor([float(number)]))}
        store.save(state_of(number, clients))
    assert store.rounds() == [4, 5]
    for number in (4, 5):
        state, _ = Checkpoints(tmp_path).load(number, state_of(0, {}), Client(None))
        assert {i: float(record.c) for i, record in state.clients.items()} == {i: i for i in range(1, number + 1)}
    assert (tmp_path / "thesis.txt").exists()


def test_clients_records_may_lie_elsewhere_than_the_model(tmp_path):
    """ "meta" stands for a GPU that all of them would not fit."""
    store, client = Checkpoints(tmp_path), Client(torch.zeros(50))
    store.save(state_of(1, {3: Client(torch.arange(50.0))}))
    like = state_of(0, {})
    like.server = Model(like.server.x.to("meta"))
    state, _ = store.load(1, like, client, torch.device("cpu"))
    assert state.server.x.is_meta
    assert torch.equal(state.clients[3].c, torch.arange(50.0))
    with_the_model, _ = store.load(1, like, client)
    assert with_the_model.clients[3].c.is_meta


def test_a_failed_save_loses_nothing(tmp_path, monkeypatch):
    """A user of the Python API may free some space and save again."""
    store = Checkpoints(tmp_path)
    records = {i: Client(torch.tensor([float(i)])) for i in range(10)}
    store.save(state_of(1, records))
    records = {**records, **{i: Client(torch.tensor([float(-i)])) for i in range(6)}}  # the others have to move
    write = checkpoint.write_file
    for failing in ("clients", "state", "round"):
        with monkeypatch.context() as patch:

            def full(path, data, failing=failing):
                if path.name.startswith(failing):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                write(path, data)

            patch.setattr(checkpoint, "write_file", full)
            with pytest.raises(BadInput, match="No space left"):
                store.save(state_of(2, records))
    store.save(state_of(2, records))
    state, _ = Checkpoints(tmp_path).load(2, state_of(0, {}), Client(None))
    assert {i: float(r.c) for i, r in state.clients.items()} == {i: float(r.c) for i, r in records.items()}


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.complex128),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0,)])
def test_every_dtype_survives_bit_for_bit(dtype, shape):
    """Bytes drawn at random, so NaNs with a payload and negative zeros too."""
    count = torch.zeros(shape).numel() * torch.zeros(1, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    value = raw.clone().view(dtype).reshape(shape)
    back = unpack(pack({"a/b.c": value, "alias": value}))["a/b.c"]
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw)


def simulation(name="fedlamb", **more):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(80, 5, generator=generator), torch.arange(80) % 4
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))
    return lamina.Simulation(model, data, name, test=data, clients=8, participation=0.5, batch_size=5, **more)


RESUMED = [*((name, "stacked") for name in lamina.registry()), ("scaffold", "loop"), ("mimelamb", "loop")]


@pytest.mark.parametrize(("name", "engine"), RESUMED)
def test_every_algorithm_goes_on_from_python(tmp_path, name, engine):
    """Saved after every round and restored: the server, the clients, BatchNorm, the ledger, all bit for bit."""
    options = {"sync_every": 3} if "sync_every" in lamina.algorithms.options(lamina.algorithms.find(name)) else {}
    algorithm = lamina.create(name, **options)
    whole = simulation(algorithm, engine=engine)
    whole.run(5)
    first = simulation(algorithm, engine=engine)
    for _ in range(2):
        first.run(1)
        first.save(tmp_path)
    second = simulation(algorithm, engine=engine)
    second.restore(tmp_path)
    second.run(3)
    assert without_times(second.history) == without_times(whole.history)
    kept = [i for i, record in whole.state.clients.items() if any(value is not None for value in record)]
    pairs = [(whole.state.clients[i], second.state.clients[i]) for i in kept]
    for a, b in [(whole.state.server, second.state.server), *pairs]:
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(value, second.state.buffers[n]) for n, value in whole.state.buffers.items())
    second.save(tmp_path)  # and may be saved there again


@pytest.mark.parametrize(("engine", "home"), [("stacked", "cpu"), ("loop", None)])
def test_restore_leaves_the_clients_records_where_the_engine_wants_them(tmp_path, monkeypatch, engine, home):
    """Of ten thousand clients, they might not fit the GPU that the model is on."""
    first = simulation(engine=engine)
    first.run(1)
    first.save(tmp_path)
    seen, old = [], checkpoint.load_newest

    def look(*arguments, home=None):
        seen.append(home and home.type)
        return old(*arguments, home=home)

    monkeypatch.setattr(checkpoint, "load_newest", look)
    simulation(engine=engine).restore(tmp_path)
    assert seen == [home]


def test_restore_refuses_what_is_not_there_or_does_not_fit(tmp_path, caplog):
    with pytest.raises(BadInput, match="no checkpoint of this simulation"):
        simulation().restore(tmp_path / "none")
    other = simulation("scaffold")
    other.run(1)
    other.save(tmp_path / "scaffold")
    with pytest.raises(BadInput, match=r"is of another run: algorithm = scaffold \(here fedlamb\), lr"):
        simulation("fedlamb").restore(tmp_path / "scaffold")
    assert "damaged" not in caplog.text


def test_models_in_the_folder_are_those_of_their_rounds(here):
    assert call(*command("r", rounds=9, algorithm="fedavg")) == 0
    experiment = load("small.toml", ["train.rounds=9", "algorithm.name=fedavg", "run.engine=stacked"])
    again = building.build(experiment)
    accuracies = [row["accuracy"] for row in rows("r")]
    best = accuracies.index(max(accuracies)) + 1
    for name, number in (("best", best), ("model", 9)):
        again.run(number - again.state.round)
        stored = load_file(here / "r" / f"{name}.safetensors")
        assert all(torch.equal(value, stored[key]) for key, value in again.model.state_dict().items())
        assert checkpoint.read_facts((here / "r" / f"{name}.safetensors").read_bytes())["round"] == str(number)


def test_the_best_model_survives_worse_rounds_after_it_went_on(half):
    metrics, best = half / "metrics.jsonl", (half / "best.safetensors").read_bytes()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[1]["accuracy"] = 1.0
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert call(*command(half, rounds=6)) == 0
    assert (half / "best.safetensors").read_bytes() == best


def commit_in(folder):
    """Make a repository with one commit, and return its hash."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "--no-gpg-sign", "-m", "a"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_folder_in_a_repository(tmp_path, monkeypatch):
    inner = tmp_path / "repository" / "inner"
    inner.mkdir(parents=True)
    expected = commit_in(inner.parent)
    assert git_commit(inner) == expected
    assert git_commit(Path("/")) is None
    monkeypatch.setenv("PATH", "")  # no git
    assert git_commit(inner.parent) is None


def test_the_commit_of_lamina_itself_is_kept(tmp_path, monkeypatch):
    """A run is mostly started outside lamina's repository; the working directory's commit says nothing of lamina's."""
    package = tmp_path / "checkout" / "src" / "lamina"
    package.mkdir(parents=True)
    commit = commit_in(tmp_path / "checkout")
    monkeypatch.setattr(lamina, "__file__", str(package / "__init__.py"))
    monkeypatch.chdir("/")
    found = environment("cpu")
    assert (found["commit"], found["lamina_commit"]) == (None, commit)
    installed = tmp_path / "checkout" / ".venv" / "lib" / "site-packages" / "lamina"
    monkeypatch.setattr(lamina, "__file__", str(installed / "__init__.py"))
    assert own_commit() != commit  # that of the project it is installed for
