"""Digests of models, losses and other values: the same for what computes the same."""

import linecache
import sys
import types

import pytest
import torch
from torch import nn

import lamina
from lamina.objective.fingerprint import alike, attributes_digest, code_digests, is_laminas, same_tensors, value_digest


def cell(text, monkeypatch, **values):
    """Run a cell as a notebook does, and return its names."""
    cell.number += 1
    name = f"/tmp/ipykernel_1/{cell.number}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    main = types.ModuleType("__main__")
    vars(main).update(values)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(text, name, "exec"), vars(main))
    return types.SimpleNamespace(**vars(main))


cell.number = 0
CELL = """
from torch import nn

def scale(x):
    return {factor} * x

class Net(nn.Module):
    slope = {slope}
    def forward(self, x):
        return scale(x) * self.slope * CONSTANT

loss = lambda o, t: o - {factor} * t
"""


def digests_of_cell(monkeypatch, factor=2, slope=1.0, constant=3, extra=""):
    names = cell(CELL.format(factor=factor, slope=slope) + extra, monkeypatch, CONSTANT=constant)
    return code_digests([names.Net, names.loss]), value_digest([names.Net, names.loss])


def test_a_cell_of_a_notebook_that_is_run_again_is_the_same_code(monkeypatch):
    code, values = digests_of_cell(monkeypatch)
    assert list(code) == ["notebook"]
    assert digests_of_cell(monkeypatch, extra="# a comment\nrounds = 20\n") == (code, values)
    assert digests_of_cell(monkeypatch, factor=4)[0] != code
    assert digests_of_cell(monkeypatch, slope=2.0) != (code, values)
    assert digests_of_cell(monkeypatch, constant=4) == (code, digests_of_cell(monkeypatch, constant=4)[1])
    assert digests_of_cell(monkeypatch, constant=4)[1] != values


def test_code_that_is_in_no_file_counts_by_its_bytecode():
    def run(text):
        scope = {"__name__": "nowhere"}
        exec(text, scope)
        return scope["f"]

    one, same, other = (run(f"def f(x):\n    return x + {number}") for number in (1, 1, 2))
    assert code_digests([one]) == {}
    assert value_digest(one) == value_digest(same) != value_digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (True, 1),
        ([1, 2], (1, 2)),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        (torch.ones(2), torch.ones(2).double()),
        (torch.ones(2), torch.ones(1, 2)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (lamina.FedAvg, lamina.FedLamb),
    ],
)
def test_other_values_have_other_digests(one, other):
    assert value_digest(one) == value_digest(one) != value_digest(other)
    assert not alike(one, other)


def test_a_device_and_an_order_without_meaning_do_not_count():
    assert value_digest(torch.device("cpu")) == value_digest(torch.device("cuda"))
    assert value_digest({0, 8}) == value_digest({8, 0})
    assert value_digest(torch.ones(2, 3).mT) == value_digest(torch.ones(3, 2))


def test_weights_count_only_where_they_are_asked_for():
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    assert attributes_digest(one) == attributes_digest(other) != attributes_digest(nn.Linear(2, 1, bias=False))
    assert alike(one, other, weights=False)
    assert not alike(one, other)
    other.load_state_dict(one.state_dict())
    assert alike(one, other)


def test_tensors_are_the_same_by_name_type_and_number():
    one, zero = torch.ones(2), torch.zeros(2)
    assert same_tensors({"a": one, "b": zero}, {"b": zero.clone(), "a": one.clone()})
    for other in ({"a": zero}, {"b": one}, {"a": one.double()}, {"a": one, "b": one}, (one,), one):
        assert not same_tensors({"a": one}, other)
    missing = torch.tensor([float("nan")])
    assert same_tensors(missing, missing)  # the same tensor


def test_only_laminas_code_is_laminas():
    assert is_laminas(lamina.FedAvg)
    assert not is_laminas(nn.Linear(1, 1))
    assert not is_laminas(types.SimpleNamespace(__module__="laminated"))
