"""Edited code of the user's is another run, whatever part of it the run uses; what code counts or logs is not."""

import importlib
import sys

import pytest
import torch

import lamina

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
    shrink = 0.5

    def update(self, server, up, info):
        return server._replace(x=server.x + shrunk(up.delta, self.shrink))


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
    for name in ("mine", "mine_too"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("bent(self.layer(x)) + ", "bent(self.layer(x)) - ", "model"),
        ("torch.relu(", "torch.sin(", "model"),
        ("SLOPE = 2.0", "SLOPE = 3.0", "model"),
        ("offset = 0.5", "offset = 0.25", "model"),
        ("1.0 * torch.einsum", "0.9 * torch.einsum", "aggregation_digest"),
        ("shrink = 0.5", "shrink = 0.25", "algorithm_digest"),
        ("return by * delta", "return by * delta / 2", "algorithm_digest"),
        ("FACTOR = 0.5", "FACTOR = 0.25", "metrics_digest"),
        ("outputs.argmax(1) == targets", "outputs.argmin(1) == targets", "metrics_digest"),
    ],
)
def test_edited_code_is_another_run(old, new, named, write, tmp_path):
    first = write().make(out=tmp_path / "run")
    first.run(1)
    first.save(tmp_path / "saved")
    again = write()
    assert len(again.make(out=tmp_path / "run").run(2)) == 2  # the same code, imported anew
    again.make().restore(tmp_path / "saved")
    edited = write(old, new)
    for rounds in (2, 3):  # complete, and to be resumed
        with pytest.raises(lamina.BadInput, match=rf"holds another run: .*{named}"):
            edited.make(out=tmp_path / "run").run(rounds)
    if named != "metrics_digest":  # does not change the trajectory
        with pytest.raises(lamina.BadInput, match=rf"is of another run: .*{named}"):
            edited.make().restore(tmp_path / "saved")


def test_what_code_counts_and_logs_makes_no_other_run(write, tmp_path):
    mine = write()
    mine.make(out=tmp_path / "run").run(1)
    assert mine.calls > 0
    assert mine.seen
    assert len(mine.make(out=tmp_path / "run").run(2)) == 2
    unused = write(
        "def shrunk(delta, by):", 'UNUSED = 1  # and a comment\n\n\ndef shrunk(delta, by):\n    """A docstring."""'
    )
    assert len(unused.make(out=tmp_path / "run").run(3)) == 3


def test_weights_and_collections_that_a_loss_uses_count():
    scope = {"__name__": "somewhere", "torch": torch}
    lines = "def loss(o, t):\n    return {} * torch.nn.functional.cross_entropy(o, t, reduction='none')"
    exec(lines.format("table['a'] * criterion(o, t)"), scope)
    from lamina.objective.fingerprint import code_digest

    def digest(a, weight):
        scope["table"] = {"a": a}
        scope["criterion"] = torch.nn.CrossEntropyLoss(weight=torch.tensor(weight), reduction="none")
        return code_digest(scope["loss"])

    assert digest(1, [1.0, 2.0]) == digest(1, [1.0, 2.0])
    assert len({digest(1, [1.0, 2.0]), digest(2, [1.0, 2.0]), digest(1, [1.0, 3.0])}) == 3
