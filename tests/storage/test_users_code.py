"""A run is resumed with the code that began it; a changed file is named, and may be accepted."""

import importlib
import logging
import subprocess
import sys

import pytest

import lamina
from lamina.experiment.runs.records import read_record
from lamina.report.curves import group
from lamina.report.tables import runs_tables

MINE = """
import lamina
import torch
from torch import nn

import mine_too

SLOPE = 2.0
calls, seen = 0, []


class Net(nn.Module):
    offset = 0.5

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, x):
        return bent(self.layer(x)) + self.offset


def bent(x):
    global calls
    calls += 1
    seen.append(len(x))
    return torch.relu(SLOPE * x)


class Mean:
    def combine(self, values, weights):
        return 1.0 * torch.einsum("c,c...->...", weights.to(values), values)


@lamina.algorithm("mine_fedavg", title="Mine", lr=0.1)
class Mine(lamina.FedAvg):
    def update(self, server, up, info):
        return server._replace(x=server.x + shrunk(up.delta, 0.5))


def shrunk(delta, by):
    return by * delta


def hits(outputs, targets):
    return mine_too.FACTOR * mine_too.right(outputs, targets).double().mean()


def make(**changes):
    data = torch.linspace(-1, 1, 300).reshape(60, 5), torch.arange(60) % 2
    settings = {"lr": 0.1, "clients": 3, "batch_size": 10, "participation": 1.0, "device": "cpu"}
    parts = {"aggregation": Mean(), "metrics": [lamina.Metric("hits", hits)]}
    torch.manual_seed(0)
    return lamina.Simulation(Net(), data, Mine(), test=data, **settings, **parts, **changes)
"""
MINE_TOO = """
FACTOR = 0.5


def right(outputs, targets):
    return outputs.argmax(1) == targets
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the modules with an edit, and import them anew."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(old="", new=""):
        for name, text in (("mine_too", MINE_TOO), ("mine", MINE)):
            assert old in MINE + MINE_TOO
            (tmp_path / f"{name}.py").write_text(text.replace(old, new) if old else text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            return importlib.import_module("mine")
        finally:
            sys.dont_write_bytecode = before

    yield written
    for name in ("mine", "mine_too", "mine_three"):
        sys.modules.pop(name, None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "file"),
    [
        ("bent(self.layer(x)) + ", "bent(self.layer(x)) - ", "mine.py"),
        ("SLOPE = 2.0", "SLOPE = 3.0", "mine.py"),
        ("1.0 * torch.einsum", "0.9 * torch.einsum", "mine.py"),
        ("return by * delta", "return by * delta / 2", "mine.py"),
        ("FACTOR = 0.5", "FACTOR = 0.25", "mine_too.py"),
    ],
)
def test_a_changed_file_is_refused_by_its_name(old, new, file, write, tmp_path):
    first = write().make(out=tmp_path / "run")
    first.run(1)
    first.save(tmp_path / "saved")
    again = write()
    assert len(again.make(out=tmp_path / "run").run(2)) == 2  # the same code, imported anew
    again.make().restore(tmp_path / "saved")
    edited = write(old, new)
    what = rf"{file} changed; resume anyway with --set run.accept_changed_code=true \(accept_changed_code=True\)"
    for rounds in (2, 3):  # complete, and to be resumed
        with pytest.raises(
            lamina.BadInput, match=rf"^cannot resume the folder '.*/run': {what}, choose another"
        ) as error:
            edited.make(out=tmp_path / "run").run(rounds)
    assert "\n" not in str(error.value)
    with pytest.raises(lamina.BadInput, match=rf"^cannot resume from the checkpoint of round 1 .*: {what}, or use"):
        edited.make().restore(tmp_path / "saved")
    edited.make(accept_changed_code=True).restore(tmp_path / "saved")


def test_accepted_code_is_recorded_and_shown(write, tmp_path, caplog):
    write().make(out=tmp_path / "run").run(1)
    edited = write("SLOPE = 2.0", "SLOPE = 3.0")
    caplog.set_level(logging.WARNING)
    assert len(edited.make(out=tmp_path / "run", accept_changed_code=True).run(2)) == 2
    assert "mine.py changed; accepted (run.accept_changed_code)" in caplog.text
    record = read_record(tmp_path / "run")
    assert record.environment["code changed after round 1"] == "mine.py changed"
    assert record.environment["started"]
    assert "mine.py changed; accepted" in (tmp_path / "run" / "log.txt").read_text()
    assert ["code changed after round 1", "mine.py changed"] in [
        [row[0], row[1]] for row in runs_tables(group([record]))[1].rows
    ]
    assert len(edited.make(out=tmp_path / "run").run(3)) == 3  # is the code of the run now


def test_files_that_come_and_go_are_named(write, tmp_path):
    write().make(out=tmp_path / "run").run(1)
    (tmp_path / "mine_three.py").write_text(MINE_TOO)
    edited = write("import mine_too", "import mine_three as mine_too")
    with pytest.raises(
        lamina.BadInput, match=r": mine.py changed, mine_three.py is new, mine_too.py is no longer used; resume anyway"
    ):
        edited.make(out=tmp_path / "run").run(2)


def test_what_code_counts_and_logs_makes_no_other_run(write, tmp_path):
    mine = write()
    mine.make(out=tmp_path / "run").run(1)
    assert mine.calls > 0
    assert mine.seen
    assert len(mine.make(out=tmp_path / "run").run(2)) == 2


def test_comments_docstrings_and_formatting_may_change(write, tmp_path):
    write().make(out=tmp_path / "run").run(1)
    other = write(
        "def shrunk(delta, by):\n    return by * delta",
        '# A comment.\n\n\ndef shrunk(\n    delta,\n    by,\n):\n    """A docstring."""\n    return (by * delta)',
    )
    assert len(other.make(out=tmp_path / "run").run(2)) == 2


def test_a_file_that_is_edited_during_a_run_does_not_matter_to_it(write, tmp_path):
    simulation = write().make(out=tmp_path / "run")
    simulation.run(1)
    (tmp_path / "mine.py").write_text("SLOPE = 4.0\n")
    assert len(simulation.run(1)) == 2


SCRIPT = """
import sys

import lamina
import torch

from mine_too import FACTOR

weights = torch.tensor([1.0, 2.0])
table = [3.0]
losses = []


def helper(o, t):
    losses.append(o)
    return torch.nn.functional.cross_entropy(o, t, weight=weights, reduction="none")


def loss(o, t):
    return table[0] * helper(o, t)


data = torch.linspace(-1, 1, 300).reshape(60, 5), torch.arange(60) % 2
torch.manual_seed(0)
settings = {"clients": 3, "device": "cpu", "engine": "loop", "out": "run"}
simulation = lamina.Simulation(torch.nn.Linear(5, 2), data, "fedavg", loss=loss, **settings)
for _ in range(2):
    print(len(simulation.run(int(sys.argv[1]))))
"""


def run_script(folder, rounds, old="", new=""):
    assert old in SCRIPT
    (folder / "mine_too.py").write_text(MINE_TOO)
    (folder / "script.py").write_text(SCRIPT.replace(old, new) if old else SCRIPT)
    finished = subprocess.run([sys.executable, "script.py", str(rounds)], cwd=folder, capture_output=True, text=True)
    return finished.stdout.split(), finished.stderr


@pytest.mark.long
def test_of_a_script_only_the_functions_and_values_count_that_a_run_uses(tmp_path):
    assert run_script(tmp_path, 1)[0] == ["1", "2"]
    assert run_script(tmp_path, 2, "import sys", "import sys\n\nUNUSED = 1")[0] == ["2", "4"]
    _, error = run_script(tmp_path, 3, "losses.append(o)", "losses.append(t)")
    assert "cannot resume the folder 'run': script.py changed; resume anyway" in error
    for old, new in (("[1.0, 2.0]", "[1.0, 3.0]"), ("table = [3.0]", "table = [4.0]")):
        _, error = run_script(tmp_path, 3, old, new)
        assert "the weights or other values of the loss (loss_values) changed" in error
