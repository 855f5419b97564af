"""The command line: `lamina run`, errors in one line, Ctrl-C."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from helpers import call, sets
from lamina import BadInput, __version__, algorithms
from lamina.cli import base
from lamina.experiment import build as building
from lamina.experiment.config import load, parse
from lamina.experiment.runs.folder import RunFolder
from lamina.training.history import History
from lamina.training.training import Training


def rounds_in(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_run_trains_and_keeps_records(here, capsys):
    assert call("run", "small.toml") == 0
    printed = capsys.readouterr()
    assert "Fed-LAMB: 3 rounds, best accuracy" in printed.out
    assert printed.err == ""  # no progress bar outside a terminal
    run = here / "runs" / "small-fedlamb-seed0"
    rows = rounds_in(run)
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert 0 <= rows[-1]["accuracy"] <= 1
    config = json.loads((run / "config.json").read_text())
    assert (config["algorithm"]["name"], config["algorithm"]["decay"]) == ("fedlamb", 0.01)
    weights = load_file(run / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) == 64 * 16 + 16 + 16 * 10 + 10

    assert call("run", "small.toml") == 0
    printed = capsys.readouterr()
    assert "is complete: 3 rounds" in printed.out
    assert printed.err == ""
    assert call("run", "small.toml", "--overwrite", "--quiet", "--set", "train.rounds=1") == 0
    assert capsys.readouterr() == ("", "")
    assert len(rounds_in(run)) == 1


def test_a_diverging_run_exits_3_and_keeps_its_rounds(here, capsys):
    overrides = sets("algorithm={name='fedavg'}", "train.schedule={name='exponential', gamma=1e30}")
    assert call("run", "small.toml", "--out", "d", *overrides) == 3
    assert "diverged: round" in capsys.readouterr().err
    assert rounds_in(here / "d")


def test_the_summary_of_a_small_run_has_a_fitting_unit(capsys):
    base.print_summary(History([{"round": 1, "loss": 0.5, "bytes_down": 1200, "bytes_up": 1100, "seconds": 0.1}]))
    assert capsys.readouterr().out == "1 round, best loss 0.5000, last 0.5000, 2.3 kB sent, 0.1 s\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "none.toml"], "cannot read the experiment file 'none.toml'"),
        (["run", "small.toml", "--set", "train.round=5"], "[train] has no key 'round'; did you mean 'rounds'?"),
        (["run", "small.toml", "--set", "rounds=5"], "the file has no key 'rounds'; did you mean 'train.rounds'?"),
        (["run", "small.toml", "--set", "trian.rounds=5"], "the file has no key 'trian'; did you mean 'train'?"),
        (["run", "small.toml", "--set", "train.rounds=0"], "train.rounds = 0: input should be greater than"),
        (["run", "small.toml", "--set", "train.rounds=lots"], "train.rounds = 'lots': input should be a valid integer"),
        (["run", "small.toml", "--set", "train.weighting=size"], "'clients' or 'examples'"),
        (["run", "small.toml", "--set", "train.rounds"], "section.key=value"),
        (["run", "small.toml", "--set", "algorithm.name=fedlam"], "did you mean 'fedlamb'?"),
        (["run", "small.toml", "--set", "algorithm.beta_1=0.5"], "did you mean 'beta1'?"),
        (["run", "small.toml", "--set", "model.name=mpl"], "did you mean 'mlp'?"),
        (["run", "small.toml", "--set", "data.name=digit"], "did you mean 'digits'?"),
        (["run", "small.toml", "--set", "data.partition=dirichlt"], "did you mean 'dirichlet'?"),
        (["run", "small.toml", "--set", "data.clients=100000"], "1438"),
        (["run", "small.toml", "--set", "data.name=mnist", "--set", "data.dir=."], "train-images-idx3-ubyte"),
        (["run", "small.toml", "--set", "run.device=gpu"], "; use auto, cpu, or a GPU"),
        (["compare", "small.toml", "--algorithms", "fedavg,nope"], "unknown algorithm 'nope'"),
        (["run", "small.toml", "--set", "algorithm.name=my.Own"], "your own is named 'my:Own'"),
        (["compare", "small.toml", "--algorithms", " "], "compare.algorithms is empty: name at least one"),
        (["run", "small.toml", "--sett", "train.lr=1"], "no such option"),
        (["run"], "missing argument 'EXPERIMENT.toml'; see lamina run --help"),
        (["compare", "small.toml", "--seeds", "0"], "'--seeds': 0 is not in the range"),
        (["runn"], "no such command 'runn'; did you mean 'run'?; see lamina --help"),
        (["flower", "keyz"], "no such command 'keyz'; did you mean 'keys'?; see lamina flower --help"),
        (["show", "fedlambda"], "did you mean 'fedlamb'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(here, capsys, arguments, text):
    assert call(*arguments) == 2
    printed = capsys.readouterr().err
    assert text in printed
    assert len(printed.splitlines()) == 1
    assert not (here / "runs").exists()  # nothing half-made is left behind


def test_bad_input_as_a_user_sees_it(tmp_path):
    command = [sys.executable, "-m", "lamina", "show", "fedlam"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown algorithm 'fedlam'; did you mean 'fedlamb'?")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["run", "compare", "tune"])
def test_a_gpu_that_is_not_there_is_one_line_that_helps(here, capsys, command):
    grid = ("--set", "tune.grid={'train.lr' = [0.1]}")
    assert call(command, "small.toml", "--set", "run.device=cuda", *grid) == 2
    printed = capsys.readouterr().err
    assert "device = 'cuda': torch cannot use it here (" in printed
    assert "; use auto, cpu, or a GPU that `lamina doctor` lists, such as cuda or cuda:1" in printed
    assert printed.count("\n") == 1


def test_without_a_command_there_is_help(here, capsys):
    for arguments in ((), ("flower",)):
        assert call(*arguments) == 2
        printed = capsys.readouterr()
        assert "Usage: lamina" in printed.out + printed.err
        assert "error:" not in printed.err
    assert call("run", "--help") == 0


def test_bad_toml_is_named(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[train\nrounds = 3")
    with pytest.raises(BadInput, match="not valid TOML"):
        load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not a text file"):
        load(path)


def test_short_forms():
    short = parse(
        {"data": {"partition": "iid"}, "model": "mlp", "algorithm": "fedavg", "train": {"schedule": "cosine"}}
    )
    assert (short.data.partition.name, short.model.name, short.algorithm.name) == ("iid", "mlp", "fedavg")
    assert short.train.schedule.name == "cosine"


@pytest.mark.parametrize("file", sorted(Path(__file__).parents[2].glob("experiments/*.toml")), ids=lambda p: p.name)
def test_shipped_experiments_are_valid(file):
    load(file)


def test_overwrite_replaces_a_run_and_nothing_else(here, capsys):
    quick, before = ("--set", "train.rounds=1", "--quiet"), (here / "small.toml").read_bytes()
    assert call("run", "small.toml", "--out", "r", *quick) == 0
    (here / "r" / "thesis.txt").write_text("years of work")
    assert call("run", "small.toml", "--out", "r", "--overwrite", *quick) == 2
    assert "holds other files ('thesis.txt')" in capsys.readouterr().err
    assert (here / "r" / "thesis.txt").read_text() == "years of work"
    (here / "r" / "thesis.txt").unlink()
    assert call("run", "small.toml", "--out", "r", "--overwrite", *quick) == 0
    (here / "r" / "config.json").write_text('{"theirs": 1}')
    assert call("run", "small.toml", "--out", "r", "--overwrite", *quick) == 2
    assert (here / "r" / "config.json").read_text() == '{"theirs": 1}'
    for place, text in (
        (".", "holds other files"),
        ("small.toml", "Not a directory"),
        ("small.toml/x", "Not a directory"),
    ):
        assert call("run", "small.toml", "--out", place, "--overwrite", *quick) == 2
        assert text in capsys.readouterr().err
    assert (here / "small.toml").read_bytes() == before


def test_out_may_be_the_current_folder_if_it_is_empty(here, monkeypatch):
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert call("run", "../small.toml", "--out", ".", "--quiet") == 0
    assert call("run", "../small.toml", "--out", ".", "--quiet", "--overwrite") == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_refused_before_the_work(here, capsys):
    (here / "locked").mkdir(mode=0o500)
    for command in ("run", "compare"):
        assert call(command, "small.toml", "--out", "locked/r") == 2
        assert "cannot write to the folder" in capsys.readouterr().err


def test_a_run_without_a_finished_round_may_be_replaced(here, capsys):
    wild = ("--set", "train.lr=1e38", "--set", "algorithm.name=fedavg")
    assert call("run", "small.toml", "--out", "r", *wild) == 3
    printed = capsys.readouterr().err
    assert call("run", "small.toml", "--out", "r", *wild) == 3
    assert capsys.readouterr().err == printed  # it is remembered, not run again
    assert call("run", "small.toml", "--out", "r", "--quiet") == 0
    before = (here / "r" / "metrics.jsonl").read_text()
    assert call("run", "small.toml", "--out", "r", "--overwrite", *wild) == 3
    assert (here / "r" / "metrics.jsonl").read_text() == before  # a failed replacement replaces nothing


def test_config_is_resolved_and_files_are_readable(here):
    assert call("run", "small.toml", "--out", "r", "--quiet", "--set", "train.schedule=cosine") == 0
    config = json.loads((here / "r" / "config.json").read_text(), parse_constant=pytest.fail)
    assert config["algorithm"]["decay"] == 0.01
    assert config["algorithm"]["phi_max"] == "inf"
    assert set(config["algorithm"]) == {"name", "preset", *algorithms.options(algorithms.FedLamb)}
    assert config["train"]["lr"] == 0.02
    assert config["train"]["schedule"] == {"name": "cosine", "rounds": 3, "floor": 0.0}
    assert config["model"] == {"name": "mlp", "hidden": 16, "depth": 1, "dropout": 0.0}
    assert config["run"]["device"] in ("cpu", "cuda")
    assert config["run"]["engine"] == "stacked"
    environment = json.loads((here / "r" / "environment.json").read_text())
    assert {"lamina", "torch", "numpy", "python", "platform", "device_name", "threads", "started"} <= set(environment)
    modes = {path.name: path.stat().st_mode for path in (here / "r").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_metrics_are_valid_json(here):
    experiment = load("small.toml")
    simulation = building.build(experiment)
    with RunFolder(here / "r", building.resolved(experiment, simulation)) as folder:
        folder.record({"round": 1, "loss": math.nan, "x": math.inf, "accuracy": 0.5}, simulation)
    assert rounds_in(here / "r") == [{"round": 1, "loss": None, "x": None, "accuracy": 0.5}]


@pytest.fixture
def default_ctrl_c():
    """Restore the handler of Ctrl-C: a test run in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def signal_after(monkeypatch, rounds, times=1):
    """Send this process Ctrl-C while the round after so many is being recorded."""
    record, seen = Training.record, []

    def counted(self, *arguments, **options):
        seen.append(1)
        if len(seen) == rounds:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return record(self, *arguments, **options)

    monkeypatch.setattr(Training, "record", counted)


@pytest.mark.usefixtures("default_ctrl_c")
def test_ctrl_c_stops_after_the_round_and_says_how_to_resume(here, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        signal_after(patch, 2)
        assert call("run", "small.toml", "--out", "r") == 130
    printed = capsys.readouterr().err
    assert "stopped after round 2 of 3; run the same command again to resume\n" in printed
    assert len(rounds_in(here / "r")) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert call("run", "small.toml", "--out", "r") == 0
    assert "resuming after round 2" in capsys.readouterr().out
    assert [row["round"] for row in rounds_in(here / "r")] == [1, 2, 3]


@pytest.mark.usefixtures("default_ctrl_c")
def test_a_second_ctrl_c_stops_at_once(here, capsys, monkeypatch):
    signal_after(monkeypatch, 2, times=2)
    assert call("run", "small.toml", "--out", "r") == 130
    assert "interrupted; finished rounds are kept; run the same command again to resume" in capsys.readouterr().err
    assert len(rounds_in(here / "r")) == 1


OWN = """
import lamina

@lamina.algorithm("mine", title="Mine", reference="-", lr=0.1)
class Mine(lamina.FedAvg):
    pass

class Incomplete(lamina.Algorithm):
    card = lamina.FedAvg.card
"""


@mock.patch.dict(algorithms.registry())  # without the test's algorithm afterwards
def test_a_users_algorithm_is_found_in_the_current_folder(here, capsys):
    (here / "own_for_cli_test.py").write_text(OWN)
    (here / "broken_for_cli_test.py").write_text("def f(:")
    (here / "raising_for_cli_test.py").write_text("raise RuntimeError('no\\nlicence')")
    name = "own_for_cli_test:Mine"
    assert call("run", "small.toml", "--out", "r", "--set", f"algorithm.name={name}", "-q") == 0
    assert json.loads((here / "r" / "config.json").read_text())["algorithm"]["name"] == name
    capsys.readouterr()
    for wrong, text in (
        ("broken_for_cli_test:X", "SyntaxError"),
        ("raising_for_cli_test:X", "RuntimeError: no licence"),
        ("own_for_cli_test:Incomplete", "not complete"),
        ("lamina:Algorithm", "not an algorithm class"),
    ):
        assert call("run", "small.toml", "--set", f"algorithm.name={wrong}") == 2
        printed = capsys.readouterr().err
        assert text in printed
        assert len(printed.splitlines()) == 1
    assert call("run", "small.toml", "--set", "model.name=broken_for_cli_test:X") == 2
    assert "cannot load the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.seed=4", "model.seed follows from train.seed"),
        ("model.classes=3", "model.classes follows from the data"),
        ("model.input_shape=[3]", "model.input_shape follows from the data"),
        ("model.naem=mlp", "mlp has no option 'naem'; did you mean 'name'?"),
        ("algorithm.presett=authors", "did you mean 'preset'?"),
        ("data.partition.nmae=iid", "did you mean 'name'?"),
        ("train.schedule.nam=cosine", "did you mean 'name'?"),
        ("train=3", "train = 3: must be a table"),
        ("train.schedule=3", "train.schedule = 3: must be a table"),
        ("compare.grid=3", "compare.grid = 3: must be a table"),
        ("compare.options.fedlamb.name=foo", "unknown algorithm 'foo'"),
        ("compare.options.fedlamb.preset=3", "compare.options.fedlamb.preset = 3"),
    ],
)
def test_bad_values_are_one_line(here, capsys, override, text):
    command = "compare" if "options" in override else "run"
    assert call(command, "small.toml", "--set", override) == 2
    printed = capsys.readouterr().err
    assert text in printed
    assert len(printed.splitlines()) == 1
    assert not (here / "runs").exists()


def test_a_new_name_drops_the_old_options(here):
    changed = load("small.toml", ["data.partition.alpha=0.3", "data.partition.name=dirichlet", "model.name=cnn",
                                  "algorithm.name=fedlamb"])  # fmt: skip
    assert changed.data.partition.options() == {"alpha": 0.3}
    assert changed.model.options() == {}
    assert changed.algorithm.options() == {"decay": 0.01}  # the same name: nothing is dropped


def test_an_empty_file_runs(here):
    (here / "empty.toml").write_text("")
    assert call("run", "empty.toml", "--set", "train.rounds=1", "--out", "r", "-q") == 0
    assert json.loads((here / "r" / "config.json").read_text())["data"]["clients"] == 10


def test_small_commands(here, capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out.strip() == __version__
    assert call("list", "algoritms") == 2
    assert "did you mean 'algorithms'?" in capsys.readouterr().err
    assert call("list", "partitions") == 0
    assert "alpha=0.5, sizes=equal" in capsys.readouterr().out
    assert call("run", "small.toml", "--out", "a[b]c", "--set", "train.rounds=1") == 0
    assert "records and model in a[b]c/" in capsys.readouterr().out
