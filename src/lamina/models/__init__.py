"""The papers' models as plain `nn.Module`s. `create` makes one by name; `registry` lists them with their cards."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any, cast

import torch
from torch import nn

from lamina.base.errors import BadInput, LaminaError, describe_error, unknown
from lamina.base.registry import import_named, parameters_of, refuse_unknown_options
from lamina.models.plain import SMU, cifar_cnn, cifar_cnn3, cnn, lenet, mlp, small_cnn
from lamina.models.registry import GIVEN, Card, Factory, registry
from lamina.models.resnet import BasicBlock, resnet9, resnet18
from lamina.models.transformer import transformer

__all__ = [
    "SMU",
    "BasicBlock",
    "Card",
    "cifar_cnn",
    "cifar_cnn3",
    "cnn",
    "create",
    "find",
    "lenet",
    "mlp",
    "registry",
    "resnet9",
    "resnet18",
    "small_cnn",
    "transformer",
]

log = logging.getLogger(__name__)


def create(
    name: str | Factory, input_shape: tuple[int, ...], classes: int, *, seed: int | None = None, **options: Any
) -> nn.Module:
    """Create a model by name for inputs of one shape (without the batch axis) and a number of classes.

    With a seed the weights are drawn on the CPU, so they are the same on every machine, and torch's global generators
    stay as they were; without one they come from the global generator. A function or class of your own, given as it is
    or as ``package.module:factory``, is called with the options, and with `input_shape` and `classes` if it has
    arguments of these names. Values that a `functools.partial` sets are kept.

    >>> model = create("mlp", (1, 28, 28), 10, seed=0, dropout=0.5)
    >>> sum(p.numel() for p in model.parameters())
    159010
    """
    factory = find(name) if isinstance(name, str) else name
    name = name if isinstance(name, str) else str(getattr(factory, "__qualname__", type(factory).__qualname__))
    arguments = _arguments(name, factory, {"input_shape": input_shape, "classes": classes}, options)
    if name not in registry() and "classes" in arguments:
        log.info("the model '%s' is made with classes = %d, the number of classes in the data", name, classes)
    try:
        with contextlib.ExitStack() as contexts:
            if seed is not None:
                # torch.device as a context imports torch's compiler, which takes seconds: only where it has an effect
                if torch.get_default_device().type != "cpu":
                    contexts.enter_context(torch.device("cpu"))
                contexts.enter_context(torch.random.fork_rng(devices=[]))
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
            module = factory(**arguments)
    except LaminaError:
        raise
    except Exception as error:  # whatever a factory does with the options it is given
        raise BadInput(f"cannot make the model '{name}': {describe_error(error)}") from error
    if not isinstance(module, nn.Module):
        raise BadInput(f"the model '{name}' returned an object of type {type(module).__name__}, not a torch.nn.Module")
    return module


def find(name: str) -> Factory:
    """Return the factory of a name; ``package.module:factory`` finds one of your own.

    >>> find("resnet18").__name__
    'resnet18'
    """
    if ":" not in name:
        if name not in registry():
            raise unknown("model", name, registry())
        return registry()[name].factory
    target = import_named("model", name)
    if isinstance(target, nn.Module) or not callable(target):
        raise BadInput(
            f"the model '{name}' is an instance of {type(target).__name__}: name a class, or a function that returns a "
            "new model, because every run starts from weights of its own"
        )
    return cast(Factory, target)


def _arguments(name: str, factory: Factory, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a factory, after checking the names of the options against its signature."""
    parameters, takes_others = parameters_of(factory)
    if not takes_others:
        refuse_unknown_options(name, options, [option for option in parameters if option not in GIVEN])
    chosen = factory.keywords if isinstance(factory, functools.partial) else {}
    # By name only: a factory with **kwargs mostly hands them on to one that knows no input_shape.
    return {key: value for key, value in given.items() if key in parameters and key not in chosen} | options
