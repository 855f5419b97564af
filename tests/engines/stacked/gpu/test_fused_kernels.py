"""Kernels that replace several operations, against these. Needs Triton: a GPU, or its interpreter on a CPU."""

import dataclasses
import os

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import lamina
from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.algorithms.declaration import options
from lamina.algorithms.primitives import clip_by_norm
from lamina.objective.dropout import FromStreams, lowest_kept
from lamina.objective.layers import Layers

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from lamina.engines.stacked.folding import NormOptions
from lamina.engines.stacked.gpu.copies import fill_rows, flatten
from lamina.engines.stacked.gpu.local_step import LocalStep
from lamina.engines.stacked.gpu.masks import drop
from lamina.engines.stacked.gpu.norms import group_norm
from lamina.engines.stacked.gpu.sums import sum_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: 0 / 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 3
ALIGNED = {"a.weight": (16, 16), "a.bias": (16,), "b.weight": (1456,), "b.bias": (5,)}
UNALIGNED = {"a.weight": (7, 15), "a.bias": (15,), "b.weight": (1301,), "b.bias": (5,)}


def vector(values):
    """Rows that start at multiples of 16 elements, as the engine keeps them."""
    buffer = torch.zeros(len(values), -(-values.shape[1] // 16) * 16, device=DEVICE)[:, : values.shape[1]]
    return buffer.copy_(values)


def random_rows(record):
    """The record's fields with random positive numbers in every row."""
    fields = [None if value is None else torch.rand(ROWS, value.shape[-1], device=DEVICE) + 0.1 for value in record]
    return type(record)(*(None if value is None else vector(value) for value in fields))


CASES = {name: {} for name in lamina.registry()}
CASES |= {
    f"{name} {preset}": {"preset": preset} for name in lamina.registry() for preset in lamina.find(name).card.presets
}
CASES |= {
    "fedcm clipped": {"clip_direction": 0.5},
    "scaffold clipped": {"clip_direction": 0.5, "decay": 0.01},
    "fedadam_star clipped": {"clip_direction": 0.5, "decay": 0.01, "decay_form": "decoupled"},
    "fedlamb modules": {"layers": "module", "decay": 0.01},
    "fedlada corrected": {"moment_correction": "m", "ga_correction": True, "amsgrad": False, "eps": 1e-3},
    "fedlada_lamb corrected": {"moment_correction": "m", "ga_correction": True, "decay": 0.01},
    "fedlamb running": {"zero_norm": "lamb", "second_moment": "running", "first_round": "running"},
}


@pytest.mark.parametrize("shapes", [ALIGNED, UNALIGNED], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_a_fused_step_is_the_step(case, clip, shapes):
    torch.manual_seed(0)
    settings = dict(CASES[case])
    algorithm = lamina.create(case.split()[0], settings.pop("preset", None), **settings)
    layers = Layers(shapes)
    x = torch.randn(layers.size, device=DEVICE)
    needs = algorithm.needs(1)
    info = ServerInfo(1, 0.1, layers, mean_gradient=x if needs.control_variate else None)
    down = algorithm.broadcast(algorithm.init(x, layers), info)
    info = ClientInfo(1, 0.1, layers, full_gradient=x if needs.full_gradient else None)
    local = random_rows(algorithm.begin(down, algorithm.client_init(x, layers), info))
    down = random_rows(down)
    gradients = [torch.randn(ROWS, size, device=DEVICE) for size in layers.sizes]
    gradients[0] = gradients[0].bfloat16()

    def column(number):
        return torch.full((ROWS, 1), float(number), device=DEVICE)

    numbers = {
        name: column(getattr(algorithm, name)) for name, option in options(type(algorithm)).items()
        if option.type == "Number" and getattr(algorithm, name) != float("inf")
    }  # fmt: skip
    algorithm = dataclasses.replace(algorithm, **numbers)
    lr, limit = column(0.1), None if clip is None else column(clip)
    gradient = torch.cat([g.float() for g in gradients], 1)
    gradient = gradient if limit is None else clip_by_norm(gradient, limit)
    after = algorithm.step(local, down, gradient, lr, layers)
    is_active = torch.tensor([1, 0, 1], device=DEVICE)
    expected = [
        None if new is None else torch.where(is_active[:, None] > 0, new, old).clone()
        for new, old in zip(after, local, strict=True)
    ]
    rounded = vector(local.y).bfloat16()
    step = LocalStep(algorithm, local, down, lr, limit, layers, rounded)
    step.run(ROWS, is_active, step.addresses(gradients).to(DEVICE))
    for name, value, wanted in zip(local._fields, local, expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(
                value, wanted, rtol=2e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )
    for row in (0, 2):
        torch.testing.assert_close(rounded[row], local.y[row].bfloat16(), rtol=0.01, atol=0.01)


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


@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 300, 70), (1, 1000, 64)])
def test_sums_over_rows(shape):
    values = torch.randn(shape, device=DEVICE).bfloat16()
    torch.testing.assert_close(sum_rows(values), values.float().sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [7, 5000])
def test_a_vector_fills_rows(size):
    vector = torch.randn(size, device=DEVICE)
    rows, rounded = (torch.zeros(3, size + 9, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16))
    fill_rows(rows[:2, :size], vector, rounded[:2, :size])
    for filled, value in ((rows, vector), (rounded, vector.bfloat16())):
        torch.testing.assert_close(filled[:2, :size], value.expand(2, -1), rtol=0.01 * (filled is rounded), atol=0)
        assert not filled[2].any()
        assert not filled[:, size:].any()


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
