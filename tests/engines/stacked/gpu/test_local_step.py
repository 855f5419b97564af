"""Every algorithm's step in one kernel, against the step. Needs Triton: a GPU, or its interpreter on a CPU."""

import dataclasses
import os

import pytest
import torch

import lamina
from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.algorithms.declaration import options
from lamina.algorithms.primitives import clip_by_norm
from lamina.objective.layers import Layers

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from lamina.engines.stacked.gpu.local_step import LocalStep

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: 0 / 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 3
ALIGNED = {
    "a.weight": (16, 48),
    "a.bias": (16,),
    "b.weight": (1456,),
    "c.weight": (16, 48),
    "d.weight": (2, 8),
    "d.bias": (5,),
}
UNALIGNED = {
    "a.weight": (7, 15),
    "a.bias": (15,),
    "b.weight": (1301,),
    "c.weight": (7, 15),
    "d.weight": (2, 9),
    "d.bias": (5,),
}


def vector(values):
    """Rows that start at multiples of 16 elements, as the engine keeps them."""
    pitch = -(-values.shape[1] // 16) * 16
    return torch.zeros(len(values), pitch, dtype=values.dtype, device=DEVICE)[:, : values.shape[1]].copy_(values)


def random_rows(record):
    """The record's fields with random positive numbers in every row."""
    fields = [None if value is None else torch.rand(ROWS, value.shape[-1], device=DEVICE) + 0.1 for value in record]
    return type(record)(*(None if value is None else vector(value) for value in fields))


FUSED = [name for name in lamina.registry() if not lamina.create(name).needs(1).second_gradient]
CASES = {name: {} for name in FUSED}
CASES |= {f"{name} {preset}": {"preset": preset} for name in FUSED for preset in lamina.find(name).card.presets}
CASES |= {
    "fedcm clipped": {"clip_direction": 0.5},
    "scaffold clipped": {"clip_direction": 0.5, "decay": 0.01},
    "fedadam_star clipped": {"clip_direction": 0.5, "decay": 0.01, "decay_form": "decoupled"},
    "fedlamb modules": {"layers": "module", "decay": 0.01},
    "fedlamb model": {"layers": "model", "decay": 0.01},
    "fedlada corrected": {"moment_correction": "m", "ga_correction": True, "amsgrad": False, "eps": 1e-3},
    "fedlada_lamb corrected": {"moment_correction": "m", "ga_correction": True, "decay": 0.01},
    "localmuon hidden": {"muon_on": "hidden", "nesterov": False, "decay": 0.3},
    "deltasgd consecutive": {"gradients": "consecutive", "decay": 0.1, "eps": 1e-3},
    "fedsps decayed": {"decay": 0.1, "lower_bound": 0.01, "eps": 1e-3},
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
    loss = torch.rand(ROWS, 1, device=DEVICE) if needs.loss else None
    more = {} if loss is None else {"loss": loss}
    after = algorithm.step(local, down, gradient, lr, layers, **more)
    rtol = 0.02 if getattr(algorithm, "arithmetic", "") == "bfloat16" else 1e-4 if "muon" in case else 2e-6
    is_active = torch.tensor([1, 0, 1], device=DEVICE)
    expected = [
        None if new is None else torch.where(is_active[:, None] > 0, new, old).clone()
        for new, old in zip(after, local, strict=True)
    ]
    rounded = vector(local.y.bfloat16())
    step = LocalStep(algorithm, local, down, lr, limit, layers, rounded, loss)
    step.run(ROWS, is_active, step.addresses(gradients).to(DEVICE))
    for name, value, wanted in zip(local._fields, local, expected, strict=True):
        if wanted is not None:
            message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
            torch.testing.assert_close(value, wanted, rtol=rtol, atol=rtol / 20, msg=message)
    for row in (0, 2):
        torch.testing.assert_close(rounded[row], local.y[row].bfloat16(), rtol=0.01, atol=0.01)
