"""The kernels as differentiable functions, against torch. Needs a GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from gpu_numbers import draw, error
from lamina.engines.devices import arithmetic
from lamina.engines.stacked.folding import NormOptions
from lamina.engines.stacked.gpu import ops
from lamina.engines.stacked.side_stream import differentiate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer_of_many_clients_is_torchs(dtype, biased):
    x, w = draw(6, 4, 64, dtype=dtype).requires_grad_(), draw(3, 40, 64, dtype=dtype).requires_grad_()
    bias = draw(3, 40).requires_grad_() if biased else None
    leaves = [leaf for leaf in (x, w, bias) if leaf is not None]
    with arithmetic("fp32"):
        y = ops.linear(x, w, bias)
        g = draw(6, 4, 40, dtype=dtype)
        actual = [y, *torch.autograd.grad(y, leaves, g)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = torch.einsum("cbi,coi->cbo", wide[0].reshape(3, 8, 64), wide[1])
    y = (y + (wide[2].unsqueeze(1) if biased else 0.0)).reshape(6, 4, 40)
    for one, other in zip(actual, [y, *torch.autograd.grad(y, wide, g.double())], strict=True):
        assert error(one.detach(), other.detach()) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_gradients_beside_the_chain_are_those_of_autograd():
    """A weight of two layers, one that a formula uses, too, and one that is computed from others."""
    x, g = (draw(4, 64, 8, 8).contiguous(memory_format=torch.channels_last) for _ in range(2))
    shared, scaled = (0.1 * draw(2, 64, 3, 3, 64).permute(0, 1, 4, 2, 3) for _ in range(2))
    bias, scale, shift, unused = (draw(2, 64) for _ in range(4))

    def losses(shared, scaled, bias, scale, shift, unused):
        y = ops.convolve(x, shared, (1, 1), (1, 1), bias=bias)
        y = ops.group_norm(y, scale, shift, NormOptions(2, 1e-5, relu=True))
        y = ops.convolve(y, 2.0 * scaled, (1, 1), (1, 1))
        y = ops.convolve(ops.group_norm(y, scale, shift, NormOptions(4, 1e-5), y), shared, (1, 1), (1, 1), bias=bias)
        return (y * g).flatten(1).sum(1) + shared.square().sum()

    def leaves():
        return [value.detach().requires_grad_() for value in (shared, scaled, bias, scale, shift, unused)]

    claimed = leaves()
    _, beside = differentiate(lambda: losses(*claimed), {str(i): leaf for i, leaf in enumerate(claimed)})
    expected = torch.autograd.grad(losses(*(plain := leaves())).sum(), plain, materialize_grads=True)
    for one, other in zip(beside.values(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert float(beside["5"].abs().sum()) == 0
