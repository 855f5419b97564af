"""Within the block, torch and `transformers` read no mask; afterwards they decide for themselves again."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lamina.engines.stacked.layers.attention_masks import unread_masks
from lamina.engines.stacked.probe import reads_values

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


def test_torchs_encoder_computes_the_same_without_reading_its_mask():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), torch.randn(3, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert reads_values(lambda: encoder(x, mask))
    expected = encoder(x, mask)
    with unread_masks():
        assert not reads_values(lambda: encoder(x, mask))
        torch.testing.assert_close(encoder(x, mask), expected)
    assert reads_values(lambda: encoder(x, mask))
