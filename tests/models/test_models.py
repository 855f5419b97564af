"""The papers' models: published sizes, shapes, gradients, initialisation and clear errors."""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lamina import models
from lamina.base.errors import BadInput, LaminaError
from model_shapes import SHAPES, batch

SLIM: dict[str, dict[str, Any]] = {
    "resnet9": {"width": 8},
    "resnet18": {"width": 8},
}  # the same structure, quick on one core
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {"hidden": 7, "dropout": 0.5}),
    ("mlp", {"depth": 8}),
    ("cnn", {"dropout": 0}),
    ("lenet", {"activation": "gelu"}),
    ("lenet", {"activation": "smu", "mu": 2}),
    ("lenet", {"channels": [6, 16], "hidden": [120, 84]}),
    ("lenet", {"hidden": [384]}),
    ("lenet", {"hidden": []}),
    ("cifar_cnn", {"dropout": 0}),
    ("resnet9", {"norm": "batch", "width": 8}),
    ("resnet18", {"norm": "batch", "width": 8}),
    ("resnet18", {"groups": 4, "width": 8}),
    ("resnet18", {"stem": "imagenet", "width": 8}),
]


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "published"),
    [
        ("mlp", (1, 28, 28), 10, {}, 159_010),  # 784*200 + 200 + 200*10 + 10
        ("mlp", (1, 28, 28), 10, {"dropout": 0.5}, 159_010),
        ("mlp", (1, 28, 28), 10, {"depth": 4}, 279_610),  # three more of 200*200 + 200
        ("cnn", (1, 28, 28), 10, {}, 21_840),  # 260 + 5020 + 320*50 + 50 + 510
        ("cnn", (1, 28, 28), 10, {"dropout": 0}, 21_840),
        ("small_cnn", (1, 8, 8), 10, {}, 9_930),  # 160 + 4640 + 32*4*4*10 + 10
        ("lenet", (3, 32, 32), 10, {}, 797_962),
        ("lenet", (3, 32, 32), 10, {"channels": (6, 16), "hidden": (120, 84)}, 62_006),
        ("cifar_cnn", (3, 32, 32), 10, {}, 1_626_442),
        ("cifar_cnn3", (3, 32, 32), 10, {}, 122_570),
        ("resnet9", (3, 32, 32), 10, {}, 4_903_242),
        ("resnet18", (3, 32, 32), 10, {}, 11_173_962),
        ("resnet18", (3, 32, 32), 10, {"norm": "batch"}, 11_173_962),
        ("resnet18", (3, 32, 32), 100, {}, 11_220_132),  # 90 more classes of 513
        ("resnet18", (3, 64, 64), 200, {}, 11_271_432),
        ("resnet18", (3, 32, 32), 10, {"stem": "imagenet"}, 11_181_642),  # torchvision's, 10 classes
        ("resnet18", (3, 64, 64), 200, {"stem": "imagenet"}, 11_279_112),  # 190 more classes of 513
    ],
)
def test_parameter_counts_are_the_published_ones(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], published: int
) -> None:
    with torch.device("meta"):
        assert size(models.create(name, shape, classes, **options)) == published


@pytest.mark.parametrize(("name", "shape"), [(n, s) for n, shapes in SHAPES.items() for s in shapes])
@pytest.mark.parametrize("classes", [3, 10])
def test_output_is_one_finite_logit_per_class(name: str, shape: tuple[int, ...], classes: int) -> None:
    model = models.create(name, shape, classes, seed=0, **SLIM.get(name, {}))
    logits = model(batch(shape))
    assert logits.shape == (4, classes)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(("name", "options"), [(n, SLIM.get(n, {})) for n in SHAPES] + VARIANTS)
def test_gradient_reaches_every_parameter(name: str, options: dict[str, Any]) -> None:
    shape = SHAPES[name][0]
    model = models.create(name, shape, 10, seed=0, **options)
    torch.manual_seed(0)  # dropout
    loss = nn.functional.cross_entropy(model(batch(shape, 8)), torch.arange(8))
    torch.autograd.backward(loss)
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_seed_decides_the_weights_and_leaves_the_generator_alone(name: str) -> None:
    def weights(seed: int | None) -> torch.Tensor:
        model = models.create(name, SHAPES[name][0], 10, seed=seed, **SLIM.get(name, {}))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = weights(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)  # the position of the global generator must not matter
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)

    torch.manual_seed(0)  # without a seed the global generator decides, as in plain torch
    assert torch.equal(weights(None), first)
    assert not torch.equal(weights(None), first)


def test_seeded_weights_do_not_depend_on_the_default_device() -> None:
    expected = models.create("small_cnn", (1, 8, 8), 10, seed=3)
    with torch.device("meta"):
        model = models.create("small_cnn", (1, 8, 8), 10, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_generator_is_restored_when_building_fails() -> None:
    before = torch.get_rng_state()
    with pytest.raises(BadInput):
        models.create("cnn", (1, 8, 8), 10, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "message"),
    [
        ("resnet_18", (3, 32, 32), 10, {}, "unknown model 'resnet_18'; did you mean 'resnet18'? (known: cifar_cnn"),
        ("mlp", (4,), 10, {"hiden": 3}, "mlp has no option 'hiden'; did you mean 'hidden'? (its options: hidden, dr"),
        ("small_cnn", (1, 8, 8), 10, {"dropout": 0}, "small_cnn has no option 'dropout' (it has none)"),
        ("mlp", (4,), 10, {"seed": 1.5}, "cannot make the model 'mlp': "),
        ("mlp", (4,), 10, {"seed": 2**64}, "cannot make the model 'mlp': "),
    ],
)
def test_errors_are_one_clear_line(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaminaError) as error:
        models.create(name, shape, classes, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


class Own(nn.Module):
    def __init__(self, units: int = 3, classes: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(units, classes)


@pytest.fixture
def own() -> Iterator[types.ModuleType]:
    module = types.ModuleType("users_models")
    vars(module).update(
        Own=Own,
        shaped=lambda input_shape, classes: nn.Linear(math.prod(input_shape), classes),
        plain=lambda units: nn.Linear(units, units),
        passes_on=lambda **options: Own(**options),  # must not be handed an input_shape it did not ask for
        number=3,
        text=lambda: "not a module",
    )
    sys.modules["users_models"] = module
    yield module
    del sys.modules["users_models"]


def test_a_model_of_your_own(own: types.ModuleType) -> None:
    def shape(name: str, **options: Any) -> tuple[int, ...]:
        return tuple(next(models.create(f"users_models:{name}", (2, 5), 7, **options).parameters()).shape)

    assert shape("Own", units=4) == (7, 4)
    assert shape("shaped") == (7, 10)
    assert shape("plain", units=4) == (4, 4)
    assert shape("passes_on", units=4) == (2, 4)
    assert models.find("users_models:Own") is Own
    first, second = (models.create("users_models:Own", (2, 5), 7, seed=1) for _ in range(2))
    assert torch.equal(first.get_parameter("linear.weight"), second.get_parameter("linear.weight"))


def test_a_partial_keeps_its_classes_and_the_log_names_those_of_the_data(
    own: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lamina")
    chosen = models.create(functools.partial(own.shaped, classes=5), (2, 5), 7)
    assert not caplog.messages
    from_data = models.create(functools.partial(own.shaped, input_shape=(4,)), (2, 5), 7)
    shapes = [tuple(model.get_parameter("weight").shape) for model in (chosen, from_data)]
    assert shapes == [(5, 10), (7, 4)]
    assert caplog.messages == ["the model 'partial' is made with classes = 7, the number of classes in the data"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_package:net", {}, "cannot load the model 'no_such_package:net': No module named 'no_such_package'"),
        ("users_models:Owm", {}, "module 'users_models' has no attribute 'Owm'; did you mean 'Own'?"),
        ("users_models:Own.forwards", {}, "has no attribute 'forwards'; did you mean 'forward'?"),
        ("no_such_package.nets:net", {}, "in the folder of no_such_package/nets.py, or add that to PYTHONPATH"),
        (":net", {}, "your own model is named 'package.module:name', not ':net'"),
        ("users_models:", {}, "your own model is named"),
        ("users_models:number", {}, "is an instance of int: name a class, or a function"),
        (
            "users_models:text",
            {},
            "the model 'users_models:text' returned an object of type str, not a torch.nn.Module",
        ),
        ("users_models:Own", {"unit": 4}, "has no option 'unit'; did you mean 'units'? (its options: units)"),
        ("users_models:plain", {}, "missing 1 required positional argument: 'units'"),
    ],
)
def test_errors_with_a_model_of_your_own(
    own: types.ModuleType, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput) as error:
        models.create(name, (2, 5), 7, **options)
    assert message in str(error.value)


def test_an_error_in_a_model_of_your_own_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "peft", None)
    (tmp_path / "fails.py").write_text(
        "import torch\n\ndef deep():\n    return torch.ones(2).reshape(3)\n\ndef make():\n    return deep()\n\n"
        "def lora():\n    import peft\n"
    )
    (tmp_path / "fails_at_once.py").write_text("import peft\n")
    (tmp_path / "fails_later.py").write_text("\n1 / 0\n")
    install = r"pip install -e '\.\[transformers\]'$"
    for name, message in (
        ("fails:make", r"cannot make the model 'fails:make': RuntimeError: .* \(fails\.py:4\)$"),
        ("fails.py:make", r"leave out \.py, 'fails:make'$"),
        ("fails:lora", rf"\(fails\.py:10\): {install}"),
        ("fails_at_once:make", rf"cannot load the model .*: {install}"),
        ("fails_later:make", r"ZeroDivisionError: division by zero \(fails_later\.py:2\)$"),
    ):
        with pytest.raises(BadInput, match=message):
            models.create(name, (2,), 2)
