"""The other implementation: find it, and tell which half of a method it is.

Whatever it is, it becomes a function from what lamina gives, by name, to the quantities that it computes, by name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import torch

from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo
from lamina.base.errors import BadInput, LaminaError, describe_error, short_repr
from lamina.base.registry import import_named, parameters_of
from lamina.conformance.function import EXPECTED, HALF_PARAMETERS, TITLES, Function, Half, check_options
from lamina.conformance.optimizer import OptimizerHalf
from lamina.conformance.strategy import StrategyHalf, is_old_strategy, is_strategy
from lamina.conformance.values import fields_of
from lamina.objective.layers import Layers


class Target(NamedTuple):
    """Another implementation, ready to be called."""

    half: Half
    call: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    description: str
    version: str


def find_target(
    given: Any, algorithm: Algorithm, half: Half | None, options: Mapping[str, Any], layers: Layers
) -> Target:
    """Return another implementation, given as an object or by ``module:name``.

    An instance is copied, so that a comparison neither changes its state nor begins from that of another one.
    """
    name = given if isinstance(given, str) else getattr(given, "__qualname__", type(given).__qualname__)
    implementation = import_named("implementation", given) if isinstance(given, str) else given
    with contextlib.suppress(Exception):  # not every object can be copied
        implementation = copy.deepcopy(implementation)
    return _as_target(implementation, name, algorithm, half, options, layers)


def _as_target(
    given: Any, name: str, algorithm: Algorithm, half: Half | None, options: Mapping[str, Any], layers: Layers
) -> Target:
    """Return an implementation as a target; one that creates an implementation is called with the options."""
    _refuse(given, name)
    call: OptimizerHalf | StrategyHalf | Function
    natural_half: Half
    if _creates_optimizer(given):
        check_options(name, given, options)
        _refuse_missing(name, [each for each in _missing(given, options)[1:] if each != "lr"])
        natural_half = "local" if _adapts_locally(algorithm, layers) else "server"
        takes_lr = "lr" not in options and _takes(given, "lr")
        create = functools.partial(given, **options)
        call = OptimizerHalf(name, create, layers, half or natural_half, takes_lr)
    elif _creates_implementation(given, options):
        result = _create(given, name, options)
        result_name = name if isinstance(given, type) else f"the result of {name}"
        target = _as_target(result, result_name, algorithm, half, {}, layers)
        return target._replace(description=_call_shown(name, options))
    elif is_strategy(given):
        if options:
            raise BadInput(f"{name} is an object, which takes no options ({next(iter(options))}): give its class")
        natural_half, call = "server", StrategyHalf(given, layers)
    else:
        call = Function(name, given, algorithm, options)
        natural_half = call.half
    if half not in (None, natural_half) and not isinstance(call, OptimizerHalf):
        raise BadInput(f"{name} is {TITLES[natural_half]}, not {TITLES[half]}")
    return Target(half or natural_half, call, _call_shown(name, options), version_of(given))


def _refuse(given: Any, name: str) -> None:
    """Refuse what is no implementation of a half."""
    if is_old_strategy(given):
        raise BadInput(f"{name} is a strategy of Flower's older API: give one of flwr.serverapp.strategy")
    if isinstance(given, torch.optim.Optimizer):
        raise BadInput(f"{name} is an optimizer that exists already: give its class, or a function of its parameters")
    if isinstance(given, Algorithm) or (isinstance(given, type) and issubclass(given, Algorithm)):
        raise BadInput(f"{name} is an algorithm of lamina's contract, which `lamina compare` compares with others")
    if not callable(given) and not is_strategy(given):
        name = "the other implementation" if name == type(given).__qualname__ else name
        raise BadInput(f"{name} is {short_repr(given)}, which cannot be called: give {EXPECTED}")


def version_of(given: Any) -> str:
    """Return the package of an object and its version, as ``"flwr 1.41.0"``; "" for code that is in no package."""
    function = getattr(given, "func", given)  # of a functools.partial
    owner = function if hasattr(function, "__module__") else type(function)
    package = str(owner.__module__).partition(".")[0]
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def _takes(function: Any, name: str) -> bool:
    """Return whether a function takes an argument of this name."""
    parameters, takes_any = parameters_of(function)
    return name in parameters or takes_any


def _creates_optimizer(given: Any) -> bool:
    """Return whether this is an optimizer's class, or a function of `params`."""
    if isinstance(given, type):
        return issubclass(given, torch.optim.Optimizer)
    return next(iter(parameters_of(given)[0]), "") in ("params", "parameters")


def _creates_implementation(given: Any, options: Mapping[str, Any]) -> bool:
    """Return whether this is a class, or a function that can be called with nothing but options."""
    if isinstance(given, type):
        return True
    if is_strategy(given):
        return False
    parameters, _ = parameters_of(given)
    if not parameters and _takes_positions(given):
        return False
    if any(name in parameters for names in HALF_PARAMETERS.values() for name in names):
        return False
    return not _missing(given, options)


def _takes_positions(function: Any) -> bool:
    """Return whether a function takes any number of arguments by position."""
    try:
        kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return False
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _missing(function: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the parameters that have neither a default nor an option."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        each.name
        for each in parameters
        if each.kind not in optional and each.default is each.empty and each.name not in options
    ]


def _refuse_missing(name: str, missing: Sequence[str]) -> None:
    """Refuse a class or a function whose arguments are not all given."""
    if missing:
        raise BadInput(f"{name} needs {', '.join(missing)}: give --theirs {missing[0]}=… (in Python, options)")


def _create(given: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return an object of a class, or what a function creates."""
    check_options(name, given, options)
    _refuse_missing(name, _missing(given, options))
    try:
        return given(**options)
    except LaminaError:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"cannot create {name}({_shown(options)}): {describe_error(error)}") from error


def _call_shown(name: str, options: Mapping[str, Any]) -> str:
    """Return a name with its options, as a call is written."""
    return f"{name}({_shown(options)})" if options else name


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={short_repr(value)}" for key, value in options.items())


def _adapts_locally(algorithm: Algorithm, layers: Layers) -> bool:
    """Return whether clients have more than the model while they train, or the server has nothing else."""
    x = torch.zeros(layers.size)
    server = algorithm.init(x, layers)
    mean_gradient = x if algorithm.needs(1).control_variate else None
    down = algorithm.broadcast(server, ServerInfo(1, 0.1, layers, mean_gradient=mean_gradient))
    local = algorithm.begin(down, algorithm.client_init(x, layers), ClientInfo(1, 0.1, layers))
    return len(fields_of(local)) > 1 or len(fields_of(server)) == 1
