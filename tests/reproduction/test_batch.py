"""reproduction/batch.py: methods that ran as processes of their own end where `lamina reproduce` ends alone."""

import json
import sys
import time
from pathlib import Path

import pytest

from lamina.base.errors import BadInput
from lamina.cli import main

sys.path.insert(0, str(Path(__file__).parents[2] / "reproduction"))  # as a script there has it

import batch

FILE = """
[data]
name = "digits"
clients = 5

[model]
name = "mlp"
hidden = 8

[train]
rounds = 3
participation = 1.0
batch_size = 64

[compare]
algorithms = ["fedavg", "fedlamb"]
seeds = 1

[compare.grid.fedavg]
lr = [0.03, 0.1]

[run]
device = "cpu"

[[claim]]
text = "layers help, and more data, too"
kind = "order"
expect = ["fedlamb", "fedavg", "fedavg@fewer"]
variants = { fewer = ["train.participation=0.4"] }
"""


@pytest.mark.long
def test_a_batch_stops_resumes_and_ends_as_lamina_reproduce_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(FILE)
    parts = batch.parts_of("small.toml", Path("runs"), [])
    assert [(part.variant, part.algorithm) for part in parts] == [("", "fedavg"), ("", "fedlamb"), ("fewer", "fedavg")]
    assert not batch.train(list(parts), 2, time.monotonic(), completed=pytest.fail)
    assert "small fewer: fedavg: not started" in capsys.readouterr().out

    words = ["batch.py", "small.toml", "--out", "runs", "--processes", "2"]
    monkeypatch.setattr(sys, "argv", [*words, "--only", "fedprox"])
    with pytest.raises(SystemExit, match="2"):
        batch.main()
    assert "--only fedprox: choose from fedavg, fedlamb" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--only", "fedlamb"])
    with pytest.raises(SystemExit, match="0"):
        batch.main()
    assert [part.is_done for part in parts] == [False, True, False]
    assert not Path("runs/small/claims.json").exists()

    monkeypatch.setattr(sys, "argv", words)
    for command in (batch.main, lambda: main(["reproduce", "small.toml", "--out", "alone/small", "--quiet"])):
        with pytest.raises(SystemExit) as ended:
            command()
        assert not ended.value.code
    assert all(part.is_done for part in parts)
    assert sorted(path.name for path in Path("runs").rglob("tuning/fedavg/*")) == 2 * ["lr0.03"] + 2 * ["lr0.1"]
    claims = [json.loads((Path(out) / "small" / "claims.json").read_text()) for out in ("runs", "alone")]
    assert claims[0] == claims[1]
    log = Path("runs/.parts/small.log")
    assert f"small: tables and verdicts in {log}" in capsys.readouterr().out
    assert "verdict: " in log.read_text()


def test_the_tuning_runs_of_every_method_are_in_one_table(tmp_path):
    """A reproduction that is never finished keeps them, too."""
    whole, part = tmp_path / "tuning.csv", tmp_path / "part.csv"
    batch.add_rows(part, whole)
    assert not whole.exists()
    for rows in (
        "algorithm,learning_rate,rounds,final_accuracy,chosen\nfedavg,0.1,100,0.5,True\n",
        "algorithm,learning_rate,v_init,rounds,final_accuracy,chosen\nfedams,0.1,1e-08,100,0.7,True\n",
        "algorithm,learning_rate,decay,rounds,final_accuracy,chosen\n",
    ):
        part.write_text(rows)
        batch.add_rows(part, whole)
    assert whole.read_text().splitlines() == [
        "algorithm,learning_rate,v_init,rounds,final_accuracy,chosen",
        "fedavg,0.1,,100,0.5,True",
        "fedams,0.1,1e-08,100,0.7,True",
    ]


@pytest.mark.long
def test_a_part_that_fails_is_named_with_its_log(tmp_path, capfd):
    part = batch.Part("small", "", "fedavg", ["compare", "nowhere.toml"], tmp_path / "small" / "as-given")
    assert not batch.train([part], 1, float("inf"), completed=pytest.fail)
    log = part.folder.with_suffix(".log")
    assert f"small: fedavg: ended with code 2, see {log}" in capfd.readouterr().out
    assert "nowhere.toml" in log.read_text()
    with pytest.raises(BadInput, match="lamb-fig99"):
        batch.parts_of("lamb-fig99", tmp_path, [])
