"""The picture of a partition: sizes and classes of every client, saved or refused in one line."""

import sys

import numpy as np
import pytest

from lamina.base.errors import BadInput
from lamina.data import IID, Dirichlet, label_counts, partition_picture


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (8, 10), (80, 60)])
def test_picture_draws_every_held_class(tmp_path, clients, classes):
    labels = np.tile(np.arange(classes), 100)
    parts = Dirichlet(5.0).split(labels, clients, 0)
    figure = partition_picture(parts, labels, tmp_path / "parts.png", "who holds what")
    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")
    sizes, held = figure.axes[:2]
    assert [bar.get_height() for bar in sizes.patches] == [len(part) for part in parts]
    counts = label_counts(parts, labels)
    assert np.array_equal(held.images[0].get_array(), counts.T)


def test_picture_of_regression_and_bad_paths(tmp_path):
    parts = IID().split(None, 3, 0, samples=9)
    assert len(partition_picture(parts, None).axes) == 1
    with pytest.raises(BadInput, match="cannot save"):
        partition_picture(parts, None, tmp_path / "no-such-folder" / "a.png")
    with pytest.raises(BadInput, match="cannot save"):
        partition_picture(parts, None, tmp_path / "a.nonsense")
    with pytest.raises(BadInput, match="no client"):
        partition_picture([], None)


def test_picture_leaves_pyplot_alone():
    pyplot = sys.modules.get("matplotlib.pyplot")
    before = pyplot and pyplot.get_fignums()  # another test may have left some
    partition_picture([np.arange(3)], np.array([0, 1, 1]))
    assert sys.modules.get("matplotlib.pyplot") is pyplot
    assert (pyplot and pyplot.get_fignums()) == before
