"""`Parts`: the samples of every client in one array, which behaves like a list of arrays."""

import numpy as np
import pytest

from lamina.data import IID
from lamina.data.parts import Parts, stable_order


def test_parts_behave_like_a_list_of_arrays():
    parts = IID().split(None, 4, 0, samples=10)
    assert len(parts) == 4
    assert [part.tolist() for part in parts] == [parts[i].tolist() for i in range(4)]
    assert parts[-1].tolist() == parts[3].tolist()
    assert [part.tolist() for part in parts[1:3]] == [parts[1].tolist(), parts[2].tolist()]
    assert parts.sizes.tolist() == [3, 3, 2, 2]
    with pytest.raises(IndexError):
        parts[4]
    assert parts == Parts.of([np.array(part) for part in parts])
    assert parts != IID().split(None, 4, 1, samples=10)


def test_owners_of_samples_give_every_client_its_samples_in_ascending_order():
    parts = Parts.by_owner(np.array([2, 0, 2, 0, 0]), 4)
    assert [part.tolist() for part in parts] == [[1, 3, 4], [], [0, 2], []]
    assert parts.owners(np.arange(5)).tolist() == [0, 0, 0, 2, 2]  # client 1 has no sample


def test_parts_of_no_samples_are_empty():
    assert Parts.of([]).sizes.tolist() == []
    assert [part.tolist() for part in Parts.by_owner(np.zeros(0, np.int64), 2)] == [[], []]


@pytest.mark.parametrize("kinds", [[1, 0, 1, 0], [-300, 5, -300, 70_000], [2**40, -(2**40), 0, 0]])
def test_the_order_sorts_and_keeps_ties_in_place(kinds):
    assert stable_order(np.array(kinds)).tolist() == sorted(range(4), key=lambda i: kinds[i])
