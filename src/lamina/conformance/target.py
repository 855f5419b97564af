"""Find the other implementation, and which half of a method it is.

It may be a function, an optimizer or a strategy. As a `Target`, it is a function from our values by name to the
quantities that it computes, by name.
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
    """Another implementation of a half of a method, as a function of our values by name."""

    half: Half
    call: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    description: str
    version: str


def find_target(
    theirs: Any, algorithm: Algorithm, half: Half | None, options: Mapping[str, Any], layers: Layers
) -> Target:
    """Return another implementation, given as an object or by ``module:name``.

    An instance is copied, so that a comparison neither changes its state nor begins from that of another one.
    """
    name = theirs if isinstance(theirs, str) else getattr(theirs, "__qualname__", type(theirs).__qualname__)
    theirs = import_named("implementation", theirs) if isinstance(theirs, str) else theirs
    with contextlib.suppress(Exception):  # not every object can be copied
        theirs = copy.deepcopy(theirs)
    return _as_target(theirs, name, algorithm, half, options, layers)


def _as_target(
    theirs: Any, name: str, algorithm: Algorithm, half: Half | None, options: Mapping[str, Any], layers: Layers
) -> Target:
    """Return an implementation as a target; one that creates an implementation is called with the options."""
    _refuse_other_objects(theirs, name)
    call: OptimizerHalf | StrategyHalf | Function
    natural_half: Half
    if _creates_optimizer(theirs):
        check_options(name, theirs, options)
        _refuse_missing(name, [each for each in _missing(theirs, options)[1:] if each != "lr"])
        natural_half = "local" if _adapts_locally(algorithm, layers) else "server"
        takes_lr = "lr" not in options and _takes(theirs, "lr")
        create = functools.partial(theirs, **options)
        call = OptimizerHalf(name, create, layers, half or natural_half, takes_lr)
    elif _creates_implementation(theirs, options):
        result = _create(theirs, name, options)
        result_name = name if isinstance(theirs, type) else f"the result of {name}"
        target = _as_target(result, result_name, algorithm, half, {}, layers)
        return target._replace(description=_call_shown(name, options))
    elif is_strategy(theirs):
        if options:
            raise BadInput(f"{name} is an object, which takes no options ({next(iter(options))}): give its class")
        natural_half, call = "server", StrategyHalf(theirs, layers)
    else:
        call = Function(name, theirs, algorithm, options)
        natural_half = call.half
    if half not in (None, natural_half) and not isinstance(call, OptimizerHalf):
        raise BadInput(f"{name} is {TITLES[natural_half]}, not {TITLES[half]}")
    return Target(half or natural_half, call, _call_shown(name, options), version_of(theirs))


def _refuse_other_objects(theirs: Any, name: str) -> None:
    """Refuse an object that implements no half of a method, with a hint."""
    if is_old_strategy(theirs):
        raise BadInput(f"{name} is a strategy of Flower's older API: give one of flwr.serverapp.strategy")
    if isinstance(theirs, torch.optim.Optimizer):
        raise BadInput(f"{name} is an optimizer that exists already: give its class, or a function of its parameters")
    if isinstance(theirs, Algorithm) or (isinstance(theirs, type) and issubclass(theirs, Algorithm)):
        raise BadInput(f"{name} is an algorithm of lamina's contract, which `lamina compare` compares with others")
    if not callable(theirs) and not is_strategy(theirs):
        name = "the other implementation" if name == type(theirs).__qualname__ else name
        raise BadInput(f"{name} is {short_repr(theirs)}, which cannot be called: give {EXPECTED}")


def version_of(theirs: Any) -> str:
    """Return the package of an object and its version, as ``"flwr 1.41.0"``; "" for code that is in no package."""
    function = getattr(theirs, "func", theirs)  # of a functools.partial
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


def _creates_optimizer(theirs: Any) -> bool:
    """Return whether a value is an optimizer's class, or a function of `params`."""
    if isinstance(theirs, type):
        return issubclass(theirs, torch.optim.Optimizer)
    return next(iter(parameters_of(theirs)[0]), "") in ("params", "parameters")


def _creates_implementation(theirs: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a value is a class, or a function that needs no arguments but options."""
    if isinstance(theirs, type):
        return True
    if is_strategy(theirs):
        return False
    parameters, _ = parameters_of(theirs)
    if not parameters and _takes_positions(theirs):
        return False
    if any(name in parameters for names in HALF_PARAMETERS.values() for name in names):
        return False
    return not _missing(theirs, options)


def _takes_positions(function: Any) -> bool:
    """Return whether a function takes any number of arguments by position."""
    try:
        kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return False
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _missing(function: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters that have neither a default nor an option."""
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
    """Refuse a class or a function that needs more arguments."""
    if missing:
        raise BadInput(f"{name} needs {', '.join(missing)}: give --theirs {missing[0]}=… (in Python, options)")


def _create(theirs: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return an object of a class, or what a function creates."""
    check_options(name, theirs, options)
    _refuse_missing(name, _missing(theirs, options))
    try:
        return theirs(**options)
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
