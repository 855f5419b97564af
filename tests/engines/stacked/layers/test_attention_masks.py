"""Within the block, `transformers` believes that it is being traced; afterwards it decides for itself again."""

import sys
from types import SimpleNamespace

import pytest

from lamina.engines.stacked.layers.attention_masks import unread_masks

MODULE = "transformers.masking_utils"


def usual(tensor=None):
    return False


def test_masks_are_not_read_within_the_block(monkeypatch):
    masking = SimpleNamespace(is_tracing=usual)
    monkeypatch.setitem(sys.modules, MODULE, masking)
    with unread_masks():
        assert masking.is_tracing("a mask")
    assert masking.is_tracing is usual


def test_an_error_within_the_block_restores_the_function(monkeypatch):
    masking = SimpleNamespace(is_tracing=usual)
    monkeypatch.setitem(sys.modules, MODULE, masking)
    with pytest.raises(ValueError, match="in the model"), unread_masks():
        raise ValueError("in the model")
    assert masking.is_tracing is usual


@pytest.mark.parametrize("masking", [None, SimpleNamespace()], ids=["not loaded", "another version"])
def test_without_the_function_nothing_changes(masking, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, masking)
    with unread_masks():
        assert not hasattr(sys.modules[MODULE], "is_tracing")
