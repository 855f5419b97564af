"""Max-pooling in one kernel, against torch's. Needs a GPU."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from lamina.engines.stacked.gpu import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "window"),
    [((6, 10, 24, 24), (2, 2)), ((2, 3, 7, 9), (2, 3)), ((3, 64, 8, 8), (2, 2)), ((2, 3, 11, 11), (11, 11))],
)
@pytest.mark.parametrize("relu", [False, True])
def test_max_pooling_is_torchs(shape, window, dtype, relu):
    x = torch.randint(-8, 4, shape, device="cuda").to(dtype)  # many ties: the first of equals takes the gradient
    x[0, 0, 0, 1] = float("nan")
    x.requires_grad_()
    actual, expected = ops.max_pool(x, window, relu), F.max_pool2d(F.relu(x) if relu else x, window)
    assert torch.equal(actual.nan_to_num(-1), expected.nan_to_num(-1))
    seed = torch.randn_like(expected)
    assert torch.equal(torch.autograd.grad(actual, x, seed)[0], torch.autograd.grad(expected, x, seed)[0])
