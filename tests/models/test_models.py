"""The papers' models: published sizes, shapes, gradients, initialisation and clear errors."""

from __future__ import annotations

import functools
import inspect
import math
import re
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

SHAPES: dict[str, list[tuple[int, ...]]] = {  # every model x shapes it must take
    "mlp": [(1, 28, 28), (1, 8, 8), (13,)],
    "cnn": [(1, 28, 28), (3, 32, 32), (1, 16, 17)],
    "small_cnn": [(1, 8, 8), (1, 28, 28), (3, 2, 5)],
    "lenet": [(3, 32, 32), (1, 28, 28), (3, 64, 64), (3, 16, 16)],
    "cifar_cnn": [(3, 32, 32), (1, 28, 28), (1, 6, 7)],
    "cifar_cnn3": [(3, 32, 32), (1, 28, 28), (3, 18, 19)],
    "resnet9": [(3, 32, 32), (1, 28, 28), (1, 8, 8)],
    "resnet18": [(3, 32, 32), (3, 64, 64), (1, 28, 28)],
}
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


def batch(shape: tuple[int, ...], n: int = 4) -> torch.Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(1))


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


def test_the_table_above_covers_every_registered_model() -> None:
    assert set(SHAPES) == set(models.registry())


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


def test_full_resnet18_runs_forward_and_backward() -> None:
    model = models.create("resnet18", (3, 32, 32), 10, seed=0)
    torch.autograd.backward(model(batch((3, 32, 32), 2)).sum())
    assert all(p.grad is not None for p in model.parameters())
    assert not list(model.buffers())  # GroupNorm keeps no running statistics


def test_layer_order_is_that_of_the_papers() -> None:
    kinds = [type(layer).__name__ for layer in models.create("mlp", (1, 28, 28), 10, dropout=0.5).children()]
    assert kinds == ["Flatten", "Linear", "Dropout", "ReLU", "Linear"]
    deep = [type(layer).__name__ for layer in models.create("mlp", (1, 28, 28), 10, dropout=0.5, depth=3).children()]
    assert deep == ["Flatten", *["Linear", "Dropout", "ReLU"] * 3, "Linear"]
    kinds = [type(layer).__name__ for layer in models.create("cnn", (1, 28, 28), 10).children()]
    convolutions = ["Conv2d", "MaxPool2d", "ReLU", "Conv2d", "Dropout2d", "MaxPool2d", "ReLU"]
    assert kinds == [*convolutions, "Flatten", "Linear", "ReLU", "Dropout", "Linear"]


@pytest.mark.parametrize("name", ["mlp", "cnn", "cifar_cnn"])
def test_dropout_zero_is_off_and_changes_no_parameter(name: str) -> None:
    shape = SHAPES[name][0]
    off, on = (models.create(name, shape, 10, seed=0, dropout=p) for p in (0, 0.5))
    assert not any("Dropout" in type(m).__name__ for m in off.modules())
    assert any("Dropout" in type(m).__name__ for m in on.modules())
    assert off.state_dict().keys() == on.state_dict().keys()
    x = batch(shape)
    assert torch.equal(off(x), off(x))
    assert torch.equal(off(x), on.eval()(x))


def test_cifar_cnn_has_pfls_dropouts_and_xavier_weights() -> None:
    model = models.create("cifar_cnn", (3, 32, 32), 10, seed=0)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25, 0.5]
    bound = math.sqrt(6 / (12544 + 128))  # Xavier: U(-b, b) with b = sqrt(6 / (fan_in + fan_out))
    largest = model.get_parameter("hidden.weight").abs().max().item()
    assert 0.999 * bound < largest <= bound


def test_resnet_norms() -> None:
    grouped = models.create("resnet18", (3, 32, 32), 10, width=8)
    norms = [m for m in grouped.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 20  # stem, 8 blocks of 2, 3 projections
    assert {m.num_groups for m in norms} == {2}
    batched = models.create("resnet18", (3, 32, 32), 10, width=8, norm="batch")
    assert sum(isinstance(m, nn.BatchNorm2d) for m in batched.modules()) == 20
    assert grouped.state_dict().keys() <= batched.state_dict().keys()


def test_resnet_sees_the_image_at_four_scales() -> None:
    model = models.create("resnet18", (3, 32, 32), 10, width=8)
    x, scales = batch((3, 32, 32)), {}
    for name, layer in model.named_children():
        x = layer(x)
        scales[name] = tuple(x.shape[1:])
    assert [scales[f"stage{i}"] for i in (1, 2, 3, 4)] == [(8, 32, 32), (16, 16, 16), (32, 8, 8), (64, 4, 4)]


def test_smu_is_its_formula() -> None:
    x = torch.linspace(-3, 3, 61, dtype=torch.float64)
    for mu in (0.0, 0.3, 1.0, 5.0):
        expected = [0.5 * (v + v * math.erf(mu * v)) for v in x.tolist()]
        torch.testing.assert_close(models.SMU(mu)(x), torch.tensor(expected, dtype=torch.float64))


def test_smu_limits() -> None:
    x = torch.linspace(-3, 3, 61, dtype=torch.float64)
    torch.testing.assert_close(models.SMU(1 / math.sqrt(2))(x), nn.GELU()(x))
    gaps = [(models.SMU(mu)(x) - torch.relu(x)).abs().max().item() for mu in (1, 10, 100, 1e6)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-12
    assert torch.autograd.gradcheck(models.SMU(2.0), x.clone().requires_grad_())


def test_lenet_activations() -> None:
    for name, kind in (("relu", nn.ReLU), ("gelu", nn.GELU), ("smu", models.SMU)):
        model = models.create("lenet", (3, 32, 32), 10, activation=name, mu=3)
        assert sum(type(m) is kind for m in model.modules()) == 4
    assert "mu=3" in repr(model)
    model = models.create("lenet", (3, 32, 32), 10, activation="gelu")
    assert {m.approximate for m in model.modules() if isinstance(m, nn.GELU)} == {"tanh"}


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


def test_registry_records() -> None:
    for name, card in models.registry().items():
        assert card.name == name
        assert card.description.endswith(".")
        assert card.paper
        assert inspect.Parameter.empty not in card.options.values()
        assert not {"input_shape", "classes", "seed"} & set(card.options)
        assert card.factory is getattr(models, name)
    assert models.registry()["cnn"].options == {"dropout": 0.5}


def test_a_shape_may_be_a_list() -> None:
    shape: Any = [1, 28, 28]
    assert models.create("cnn", shape, 10)(batch((1, 28, 28))).shape == (4, 10)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "message"),
    [
        ("resnet_18", (3, 32, 32), 10, {}, "unknown model 'resnet_18'; did you mean 'resnet18'? (known: cifar_cnn"),
        ("mlp", (4,), 10, {"hiden": 3}, "mlp has no option 'hiden'; did you mean 'hidden'? (its options: hidden, dr"),
        ("small_cnn", (1, 8, 8), 10, {"dropout": 0}, "small_cnn has no option 'dropout' (it has none)"),
        (
            "cnn",
            (1, 8, 8),
            10,
            {},
            "cnn needs images [channels, height, width] of at least 16x16, not [1, 8, 8]: small",
        ),
        ("cnn", (1, 28, 15), 10, {}, "at least 16x16, not [1, 28, 15]"),
        ("cifar_cnn", (3, 5, 5), 10, {}, "at least 6x6"),
        ("cifar_cnn3", (3, 17, 17), 10, {}, "at least 18x18"),
        ("lenet", (784,), 10, {}, "lenet needs images [channels, height, width] of at least 16x16, not [784]"),
        ("resnet9", (3, 7, 8), 10, {}, "resnet9 needs images [channels, height, width] of at least 8x8, not [3, 7, 8]"),
        ("small_cnn", (1, 1, 8), 10, {}, "at least 2x2, not [1, 1, 8]: mlp takes any shape"),
        ("mlp", (), 10, {}, "mlp: input_shape must be positive whole numbers such as [1, 28, 28], not ()"),
        ("mlp", (0, 8), 10, {}, "input_shape must be positive"),
        ("mlp", 784, 10, {}, "input_shape must be positive whole numbers such as [1, 28, 28], not 784"),
        ("mlp", (2.5, 2), 10, {}, "input_shape must be positive"),
        ("mlp", (4,), 0, {}, "classes = 0 is not a whole number >= 1"),
        ("mlp", (4,), "10", {}, "classes = '10' is not a whole number >= 1"),
        ("mlp", (4,), 10, {"hidden": 0.5}, "hidden = 0.5 is not a whole number >= 1"),
        ("mlp", (4,), 10, {"hidden": True}, "hidden = True is not a whole number >= 1"),
        ("mlp", (4,), 10, {"dropout": 1}, "dropout = 1 is not a number >= 0 and < 1"),
        ("mlp", (4,), 10, {"dropout": "half"}, "dropout = 'half' is not a number >= 0 and < 1"),
        ("mlp", (4,), 10, {"dropout": float("nan")}, "dropout = nan is not a number"),
        ("lenet", (3, 32, 32), 10, {"activation": "gelo"}, "unknown activation 'gelo'; did you mean 'gelu'?"),
        ("lenet", (3, 32, 32), 10, {"activation": "smu", "mu": -1}, "mu = -1 is not a number >= 0"),
        ("lenet", (3, 32, 32), 10, {"channels": [6]}, "channels must be a list of 2 whole numbers, not [6]"),
        ("lenet", (3, 32, 32), 10, {"hidden": 384}, "hidden must be a list of whole numbers, not 384"),
        ("lenet", (3, 32, 32), 10, {"hidden": [384, 0]}, "hidden = 0 is not a whole number >= 1"),
        ("resnet18", (3, 32, 32), 10, {"norm": "layer"}, "unknown norm 'layer' (known: batch, group)"),
        ("resnet18", (3, 32, 32), 10, {"norm": None}, "unknown norm 'None'"),
        ("resnet18", (3, 32, 32), 10, {"groups": 3}, "groups must divide the 64 channels of the first stage, 3 does"),
        ("resnet18", (3, 32, 32), 10, {"stem": "imagnet"}, "unknown stem 'imagnet'; did you mean 'imagenet'?"),
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


def test_a_missing_module_is_named_with_the_searched_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput, match=re.escape(f"No module named 'sag' in '{tmp_path}' or among installed")):
        models.find("sag:make")
    (tmp_path / "imports_another.py").write_text("import no_such_package")
    with pytest.raises(BadInput, match=r"No module named 'no_such_package'$"):  # theirs was found
        models.find("imports_another:make")


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
