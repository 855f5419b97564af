"""GroupNorm with what follows it in one kernel, against torch. Needs Triton: a GPU, or its interpreter on a CPU."""

import os

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from lamina.engines.stacked.folding import NormOptions
from lamina.engines.stacked.gpu.norms import group_norm

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: 0 / 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("clients", "batch", "channels", "size", "groups", "residual", "relu", "twice"),
    [
        (2, 3, 8, (5, 5), 2, True, True, False),
        (2, 20, 6, (4, 4), 1, False, True, True),
        (3, 1, 12, (3, 7), 4, True, False, False),
        (1, 2, 64, (16, 16), 2, True, True, True),  # a group in registers
        (1, 2, 64, (32, 32), 2, False, True, True),
        (1, 1, 4, (96, 192), 1, True, True, True),  # a group that is read twice
        (1, 1, 4, (96, 192), 1, False, True, True),
        (1, 1, 96, (3, 3), 1, True, False, True),
        (2, 2, 256, (6, 5), 2, True, True, True),  # wide groups: one warp, backward
        (1, 2, 256, (4, 4), 1, False, True, False),
        (1, 2, 512, (3, 3), 1, True, True, False),
    ],
)
def test_group_norm_with_what_follows_it(clients, batch, channels, size, groups, residual, relu, twice, dtype):
    torch.manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, device=DEVICE)

    x = (3 + draw(clients * batch, channels, *size)).to(dtype).requires_grad_()
    other = draw(*x.shape).to(dtype).requires_grad_() if residual else None
    weight, bias = (draw(clients, channels).requires_grad_() for _ in range(2))
    inputs = [x, weight, bias] + ([other] if residual else [])
    y = group_norm(x, weight, bias, NormOptions(groups, 1e-5, relu, twice), other)
    parts = zip(x.double().reshape(clients, batch, *x.shape[1:]), weight.double(), bias.double(), strict=True)
    expected = torch.cat([F.group_norm(part, groups, w, b) for part, w, b in parts])
    expected = expected if other is None else expected + other.double()
    expected = F.relu(expected) if relu else expected
    results = y if twice else (y,)  # of two users, each with a gradient of its own
    seeds = [draw(*expected.shape).to(dtype) for _ in results]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    values = [results[0], *torch.autograd.grad(results, inputs, seeds)]
    wanted = [expected, *torch.autograd.grad(expected, inputs, sum(seed.double() for seed in seeds))]
    for value, right in zip(values, wanted, strict=True):
        assert (value.double() - right.double()).norm().item() < tolerance * right.double().norm().item()
