"""Flattened images and filled rows, against torch's copies. Needs Triton: a GPU, or its interpreter on a CPU."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from lamina.engines.stacked.gpu.copies import fill_rows, flatten

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: 0 / 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(3, 5, 4, 7), (2, 64, 14, 14), (2, 3, 1, 1)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_flattened_images_and_their_gradients(shape, channels_last):
    x = torch.randn(shape, device=DEVICE)
    x = (x.contiguous(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
    y = flatten(x)
    assert torch.equal(y, x.flatten(1))
    (gradient,) = torch.autograd.grad((y**2).sum(), x)
    assert torch.equal(gradient, 2 * x)
    assert gradient.stride() == x.stride()


@pytest.mark.parametrize("size", [7, 5000])
def test_a_vector_fills_rows(size):
    vector = torch.randn(size, device=DEVICE)
    rows, rounded = (torch.zeros(3, size + 9, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16))
    fill_rows(rows[:2, :size], vector, rounded[:2, :size])
    for filled, value in ((rows, vector), (rounded, vector.bfloat16())):
        torch.testing.assert_close(filled[:2, :size], value.expand(2, -1), rtol=0.01 * (filled is rounded), atol=0)
        assert not filled[2].any()
        assert not filled[:, size:].any()
