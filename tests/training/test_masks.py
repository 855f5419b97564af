"""Masks of padded sequences: the form and the name that a module's forward asks for."""

import pytest
import torch
from torch import nn

from lamina import BadInput
from lamina.data import Dataset
from lamina.training.masks import forward_of, with_mask

MASK = torch.tensor([[True, True, True], [True, False, False]])
IDS, LABELS = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([0, 1])


def taking(forward):
    """Return a module with this forward."""
    module = nn.Module()
    module.forward = forward
    return module


def test_every_name_has_its_form():
    data = with_mask(Dataset(IDS, LABELS, mask=MASK), taking(lambda ids, attention_mask, mask, lengths: ids))
    assert list(data.x) == ["ids", "attention_mask", "mask", "lengths"]
    assert data.x["ids"].tolist() == IDS.tolist()
    assert data.x["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert data.x["mask"].dtype == torch.bool
    assert data.x["lengths"].tolist() == [3, 1]
    assert data.mask is None  # it is an input now


def test_a_forward_without_a_mask_leaves_the_data_as_they_are():
    data = Dataset(IDS, LABELS, mask=MASK)
    assert with_mask(data, taking(lambda ids: ids)) is data


def test_unpadded_sequences_have_a_mask_only_where_it_is_required():
    data = Dataset(IDS, LABELS)
    assert with_mask(data, taking(lambda ids, mask=None: ids)) is data
    assert with_mask(data, taking(lambda ids, mask: ids)).x["mask"].tolist() == [[True] * 3] * 2


def test_one_mask_for_inputs_of_different_lengths_is_refused_with_the_names_that_work():
    data = Dataset({"a": IDS, "b": IDS}, LABELS, mask={"a": MASK, "b": ~MASK})
    with pytest.raises(BadInput, match=r"the lists of a and b differ in length: let it take a_mask and b_mask"):
        with_mask(data, taking(lambda a, b, mask: a))
    assert with_mask(data, taking(lambda a, b, b_lengths: a)).x["b_lengths"].tolist() == [0, 2]


def test_the_forward_of_an_adapter_is_that_of_its_base():
    base = taking(lambda ids, mask: ids)
    adapter = taking(lambda *args, **kwargs: None)
    adapter.get_base_model = lambda: base
    assert forward_of(adapter) is base.forward
    assert forward_of(base) is base.forward
