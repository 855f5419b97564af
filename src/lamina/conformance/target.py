"""The other implementation: find it, tell which half of a method it is, and call it.

Whatever it is, it becomes a function from what lamina gives, by name, to the quantities that it computes, by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo
from lamina.algorithms.declaration import options as options_of
from lamina.base.errors import BadInput, LaminaError, describe_error, nearest, short_repr
from lamina.base.registry import import_named, parameters_of
from lamina.conformance.optimizer import OptimizerHalf
from lamina.conformance.strategy import StrategyHalf, is_old_strategy, is_strategy
from lamina.objective.layers import Layers

Half = Literal["local", "server", "client"]
MODEL: Mapping[str, str] = {"local": "y", "server": "x", "client": "y"}  # the quantity that the verdict is about
WORDS: Mapping[str | None, str] = {"local": "a local half", "server": "a server half", "client": "a whole client"}
SIGNS: Mapping[str, tuple[str, ...]] = {  # parameters that tell which half a function is
    "client": ("model", "batches"), "local": ("grad",), "server": ("delta", "deltas", "x"),
}  # fmt: skip
EXPECTED = (
    "a torch optimizer's class or a function that creates one from `params`, a Flower strategy, or a function of "
    "(y, grad, …), (x, delta, …) or (model, batches, …)"
)


class Target(NamedTuple):
    """Another implementation, ready to be called."""

    half: Half
    call: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    description: str
    version: str


def find_target(
    given: Any, name: str, algorithm: Algorithm, half: Half | None, options: Mapping[str, Any], layers: Layers
) -> Target:
    """Return another implementation, given as an object or by ``module:name``."""
    if isinstance(given, str):
        name, given = given, import_named("implementation", given)
    description = f"{name}({_shown(options)})" if options else name
    guess: Half
    call: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    if is_old_strategy(given):
        raise BadInput(f"{name} is a strategy of Flower's older API: give one of flwr.serverapp.strategy")
    if is_strategy(given):
        guess, call = "server", StrategyHalf(_create(name, given, options), layers)
    elif isinstance(given, torch.optim.Optimizer):
        raise BadInput(f"{name} is an optimizer that exists already: give its class, or a function of its parameters")
    elif isinstance(given, type) and issubclass(given, Algorithm):
        raise BadInput(f"{name} is an algorithm of lamina's contract, which `lamina compare` compares with others")
    elif not callable(given):
        subject = "the other implementation" if name == type(given).__qualname__ else name
        raise BadInput(f"{subject} is {short_repr(given)}, which cannot be called: give {EXPECTED}")
    elif _creates_optimizer(given):
        guess = "local" if _adapts_locally(algorithm, layers) else "server"
        create = functools.partial(given, **options)
        call = OptimizerHalf(name, create, layers, half or guess, takes_lr=_takes(given, "lr") and "lr" not in options)
    else:
        result = _create(name, given, options) if isinstance(given, type) or _is_factory(given, options) else given
        if result is not given:
            return find_target(result, f"the result of {name}", algorithm, half, {}, layers)._replace(
                description=description
            )
        function = Function(name, given, algorithm, options)
        guess, call = function.half, function
    if half not in (None, guess) and not isinstance(call, OptimizerHalf):
        raise BadInput(f"{name} is {WORDS[guess]}, not {WORDS[half]}")
    return Target(half or guess, call, description, version_of(given))


def version_of(given: Any) -> str:
    """Return the package of an object and its version, as ``"flwr 1.41.0"``; "" for code that is in no package."""
    function = getattr(given, "func", given)  # of a functools.partial
    owner = function if hasattr(function, "__module__") else type(function)
    package = str(owner.__module__).partition(".")[0]
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


class Function:
    """A function that is called with the arguments it names.

    A parameter without a default may also have the name of an option of the algorithm, and gets its value.
    """

    def __init__(self, name: str, function: Any, algorithm: Algorithm, options: Mapping[str, Any]) -> None:
        self.name, self.function = name, function
        self.parameters, takes_any = parameters_of(function)
        self.options = dict(options)
        if unknown := [key for key in options if key not in self.parameters and not takes_any]:
            raise BadInput(f"{name} takes no {unknown[0]!r}{nearest(unknown[0], self.parameters)}")
        self.ours = {key: getattr(algorithm, key) for key in options_of(type(algorithm))}

    @property
    def half(self) -> Half:
        """Which half the function is, by its parameters."""
        for half, signs in SIGNS.items():
            if any(sign in self.parameters for sign in signs):
                return half  # type: ignore[return-value]
        known = [sign for signs in SIGNS.values() for sign in signs]
        hint = next(filter(None, (nearest(name, known) for name in self.parameters)), "")
        names = ", ".join(self.parameters) or "nothing"
        raise BadInput(f"{self.name} takes {names}{hint}: give {EXPECTED}")

    def __call__(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call the function; return the quantities in its result and in its state."""
        arguments = dict(self.options)
        for key, parameter in self.parameters.items():
            if key in arguments:
                continue
            if key in given and not key.startswith("_"):
                arguments[key] = _copy(given[key])
            elif parameter.default is inspect.Parameter.empty:
                if key not in self.ours:
                    known = sorted(each for each in given if not each.startswith("_"))
                    raise BadInput(
                        f"{self.name} takes '{key}'{nearest(key, [*known, *self.ours])}: {WORDS[self.half]} may take "
                        f"{', '.join(known)}, options of ours, and what has a default or --theirs {key}=…"
                    )
                arguments[key] = self.ours[key]
        try:
            result = self.function(**arguments)
        except LaminaError:
            raise
        except Exception as error:
            raise BadInput(f"{self.name} fails: {describe_error(error)}") from error
        state = {key: value for key, value in given["state"].items() if _is_array(value)}
        quantities = result if _is_record(result) else {given["_quantity"]: result}
        if result is None and given["_quantity"] == "y" and "model" in arguments:
            quantities = {"y": arguments["model"]}  # trained in place
        return {**state, **(quantities._asdict() if hasattr(quantities, "_asdict") else quantities)}


def as_vector(value: Any, layers: Layers, like: Tensor, name: str) -> tuple[Tensor, torch.dtype]:
    """Return a vector, an array, a module or tensors by name as one tensor like `like`, and the type they had."""
    if isinstance(value, nn.Module):
        value = dict(value.named_parameters())
    try:
        if isinstance(value, Mapping):
            tensors = {key: _tensor(value[key]) for key in layers.names}
            return layers.flatten(tensors).to(like), next(iter(tensors.values())).dtype
        tensor = _tensor(value)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise BadInput(f"{name} is {short_repr(value)}: return a tensor or array, or a dict of quantities") from error
    return tensor.to(like), tensor.dtype


def _tensor(value: Any) -> Tensor:
    return value.detach().clone() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))


def _copy(value: Any) -> Any:
    """Return a copy of a tensor, so that no function changes what the other side reads."""
    return value.clone() if isinstance(value, Tensor) else value


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (hasattr(value, "__array__") and hasattr(value, "shape"))


def _is_record(result: Any) -> bool:
    """Whether a result names its quantities; a dict of tensors by parameter's name is the model."""
    return hasattr(result, "_asdict") or (isinstance(result, Mapping) and bool({"x", "y"} & set(result)))


def _takes(function: Any, name: str) -> bool:
    parameters, takes_any = parameters_of(function)
    return name in parameters or takes_any


def _creates_optimizer(given: Any) -> bool:
    """Whether this is an optimizer's class, or a function of `params`."""
    if isinstance(given, type):
        return issubclass(given, torch.optim.Optimizer)
    return next(iter(parameters_of(given)[0]), "") in ("params", "parameters")


def _is_factory(function: Any, options: Mapping[str, Any]) -> bool:
    """Whether a function takes nothing but options: it creates the implementation."""
    parameters, _ = parameters_of(function)
    if any(sign in parameters for signs in SIGNS.values() for sign in signs):
        return False
    return all(key in options or each.default is not each.empty for key, each in parameters.items())


def _create(name: str, given: Any, options: Mapping[str, Any]) -> Any:
    """Return an object of a class, or what a function without arguments creates."""
    if not isinstance(given, type) and not inspect.isroutine(given) and not isinstance(given, functools.partial):
        return given
    try:
        return given(**options)
    except LaminaError:
        raise
    except Exception as error:
        raise BadInput(f"cannot create {name}({_shown(options)}): {describe_error(error)}") from error


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={short_repr(value)}" for key, value in options.items())


def _adapts_locally(algorithm: Algorithm, layers: Layers) -> bool:
    """Return whether clients have more than the model while they train, or the server has nothing else."""
    x = torch.zeros(layers.size)
    server = algorithm.init(x, layers)
    mean_gradient = x if algorithm.needs(1).control_variate else None
    down = algorithm.broadcast(server, ServerInfo(1, 0.1, layers, mean_gradient=mean_gradient))
    local = algorithm.begin(down, algorithm.client_init(x, layers), ClientInfo(1, 0.1, layers))
    return len(values_of(local)) > 1 or len(values_of(server)) == 1


def values_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record that its options use."""
    return {name: value for name, value in record._asdict().items() if value is not None}
