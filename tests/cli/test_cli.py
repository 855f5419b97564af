"""The command line: errors in one line, help, and experiment files with overrides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import call
from lamina import BadInput, __version__
from lamina.cli.base import app
from lamina.experiment.config import load, parse


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
        (["run", "small.toml", "--rounds", "3"], "'--rounds'; give it as --set train.rounds=3; see lamina run --help"),
        (["run", "small.toml", "--rounds=3"], "; give it as --set train.rounds=3; see"),
        (["run", "small.toml", "--learning-rate", "0.1"], "; give it as --set train.lr=0.1; see"),
        (["run", "small.toml", "--train.lr", "0.1"], "; give it as --set train.lr=0.1; see"),
        (["run", "small.toml", "--decay", "0.1"], "; give it as --set algorithm.decay=0.1; see"),
        (["run", "small.toml", "--algorithm", "fedavg"], "; give it as --set algorithm.name=fedavg; see"),
        (["run", "small.toml", "--client-metrics"], "; give it as --set run.client_metrics=…; see"),
        (["run", "small.toml", "train.rounds=3"], "(train.rounds=3); give it as --set train.rounds=3; see"),
        (["compare", "small.toml", "--rounds", "3"], "; give it as --set train.rounds=3; see lamina compare --help"),
        (["compare", "small.toml", "--target", "0.8"], "; give it as --set compare.target=0.8; see"),
        (["tune", "small.toml", "--trials", "9"], "; give it as --set tune.trials=9; see"),
        (["run", "small.toml", "--force"], "no such option '--force'; did you mean '--overwrite'?; see"),
        (["run", "small.toml", "--set", "train.learning_rate=3"], "has no key 'learning_rate'; did you mean 'lr'?"),
        (["run", "small.toml", "--set", "train.algorithm=fedavg"], "did you mean 'algorithm.name'?"),
        (["run", "small.toml", "--set", "train.decay=1"], "did you mean 'algorithm.decay'?"),
        (["run", "small.toml", "--set", "algorithm.lr=1"], "'lr' is a setting of training"),
        (["run", "small.toml", "--set", "optimizer.name=adam"], "no key 'optimizer'; did you mean 'algorithm'?"),
        (["watch", "rums"], "no folder 'rums' in '"),
        (["watch", "small.toml"], "'small.toml' is a file: give a run's folder"),
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


def test_no_word_of_the_help_is_taken_for_markup(capsys):
    """rich reads [privacy] as a style, and leaves it out of what it prints."""
    assert call("--help") == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for command in app.registered_commands:
        first_line = (command.callback.__doc__ or "").split("\n\n")[0]
        assert " ".join(first_line.split()) in printed, command.callback.__name__


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_refused_before_the_work(here, capsys):
    (here / "locked").mkdir(mode=0o500)
    for command in ("run", "compare"):
        assert call(command, "small.toml", "--out", "locked/r") == 2
        assert "cannot write to the folder" in capsys.readouterr().err


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


def test_small_commands(here, capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out.strip() == __version__
    assert call("list", "algoritms") == 2
    assert "did you mean 'algorithms'?" in capsys.readouterr().err
    assert call("list", "partitions") == 0
    assert "alpha=0.5, sizes=equal" in capsys.readouterr().out
    assert call("run", "small.toml", "--out", "a[b]c", "--set", "train.rounds=1") == 0
    assert "records and model in a[b]c/" in capsys.readouterr().out
