"""Dropout in one kernel draws the masks of its streams. Needs Triton: a GPU, or its interpreter on a CPU."""

import os

import pytest
import torch

from lamina.objective.dropout import FromStreams, lowest_kept

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from lamina.engines.stacked.gpu.masks import drop

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: 0 / 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(6, 5), (6, 7, 2), (6, 3, 4, 5)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_dropout_draws_the_masks_of_its_streams(shape, channels_last):
    class Layer(FromStreams):
        pass

    layer, p = Layer(), 0.37
    layer.streams = torch.randint(-(2**62), 2**62, (3,), device=DEVICE)
    layer.number = 3
    kept = layer.kept(shape, p)
    layer.calls = 0
    x = torch.randn(shape, device=DEVICE) + 3
    if channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    y = drop(x, *layer.next_call(shape), lowest_kept(p), 1 / (1 - p))
    torch.testing.assert_close(y, torch.where(kept, x / (1 - p), 0.0))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, torch.where(kept, 1 / (1 - p), 0.0).expand_as(x))
