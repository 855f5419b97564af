"""The command line, run as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lamina import BadInput
from lamina.experiment.config import load, parse

TOML = """
[data]
name = "digits"
clients = 8
partition = { name = "classes", k = 2 }

[model]
name = "mlp"
hidden = 16

[algorithm]
name = "fedlamb"
decay = 0.01

[train]
rounds = 3
participation = 0.5
lr = 0.02
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "small.toml").write_text(TOML)
    return tmp_path


def lamina(folder, *arguments):
    environment = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    environment.pop("FORCE_COLOR", None)
    return subprocess.run(
        [sys.executable, "-m", "lamina", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_run_trains_and_keeps_records(folder):
    done = lamina(folder, "run", "small.toml")
    assert done.returncode == 0, done.stderr
    assert "Fed-LAMB: 3 rounds, best accuracy" in done.stdout
    assert done.stderr == ""  # no progress bar outside a terminal
    run = folder / "runs" / "small-fedlamb-seed0"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert 0 <= rows[-1]["accuracy"] <= 1
    config = json.loads((run / "config.json").read_text())
    assert config["algorithm"] == {"name": "fedlamb", "preset": None, "decay": 0.01}
    weights = load_file(run / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) == 64 * 16 + 16 + 16 * 10 + 10

    again = lamina(folder, "run", "small.toml")
    assert again.returncode == 2
    assert "holds another run" in again.stderr
    replaced = lamina(folder, "run", "small.toml", "--overwrite", "--quiet", "--set", "train.rounds=1")
    assert (replaced.returncode, replaced.stdout, replaced.stderr) == (0, "", "")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_diverging_run_exits_3_and_keeps_its_rounds(folder):
    done = lamina(folder, "run", "small.toml", "--out", "d", "--set", "algorithm={name='fedavg'}",
                  "--set", "train.schedule={name='exponential', gamma=1e30}")  # fmt: skip
    assert done.returncode == 3
    assert "diverged: round" in done.stderr
    assert len((folder / "d" / "metrics.jsonl").read_text().splitlines()) >= 1


def test_compare_prints_the_table_and_saves_the_picture(folder):
    done = lamina(folder, "compare", "small.toml", "--algorithms", "fedavg, fedlada", "--seeds", "2",
                  "--set", "compare.lr.fedavg=[0.01, 0.1]", "--set", "train.lr=0.05")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "FedAvg (Fed-SGD)" in done.stdout
    assert "FedLADA" in done.stdout
    out = folder / "runs" / "small-compare"
    assert (out / "comparison.png").stat().st_size > 10_000
    assert len((out / "rounds.csv").read_text().splitlines()) == 1 + 2 * 2 * 3
    assert len((out / "tuning.csv").read_text().splitlines()) == 1 + 2


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("algorithms", ["fedlada_lamb", "mimelamb", "Sun et al. 2023"]),
        ("models", ["resnet18", "cifar_cnn"]),
        ("datasets", ["digits", "tinyimagenet"]),
        ("partitions", ["dirichlet", "reallocate"]),
    ],
)
def test_list(folder, what, expected):
    done = lamina(folder, "list", what)
    assert done.returncode == 0
    assert all(word in done.stdout for word in expected)


def test_list_algorithms_shows_the_wire_cost(folder):
    line = next(x for x in lamina(folder, "list", "algorithms").stdout.splitlines() if x.startswith("fedlada "))
    assert line.split()[2:5] == ["3", "2", "0"]


def test_show_lists_options_and_presets(folder):
    done = lamina(folder, "show", "fedlamb")
    assert "phi_min" in done.stdout
    assert "preset authors" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "none.toml"], "cannot read the experiment file 'none.toml'"),
        (["run", "small.toml", "--set", "train.round=5"], "[train] has no key 'round'; did you mean 'rounds'?"),
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
        (["run", "small.toml", "--set", "run.device=tpu9"], "tpu9"),
        (["compare", "small.toml", "--algorithms", "fedavg,nope"], "unknown algorithm 'nope'"),
        (["show", "fedlambda"], "did you mean 'fedlamb'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(folder, arguments, text):
    done = lamina(folder, *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()  # nothing half-made is left behind


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


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.parent.glob("experiments/*.toml")), ids=lambda p: p.name)
def test_shipped_experiments_are_valid(file):
    load(file)
