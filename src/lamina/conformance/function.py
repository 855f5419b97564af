"""A function as one half of a method: it is called with the arguments that it names, and returns quantities."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from lamina.algorithms.contract import Algorithm
from lamina.algorithms.declaration import options as options_of
from lamina.base.errors import BadInput, LaminaError, describe_error, nearest
from lamina.base.registry import parameters_of
from lamina.conformance.values import copied, is_array

Half = Literal["local", "server", "client"]
MODEL_NAMES: Mapping[Half, str] = {"local": "y", "server": "x", "client": "y"}  # the verdict is about this quantity
TITLES: Mapping[Half, str] = {"local": "a local half", "server": "a server half", "client": "a whole client"}
HALF_PARAMETERS: Mapping[Half, tuple[str, ...]] = {  # a function with one of these parameters is that half
    "client": ("model", "batches"), "local": ("grad", "second_grad"), "server": ("delta", "deltas", "x"),
}  # fmt: skip
EXPECTED = (
    "a torch optimizer's class or a function that creates one from `params`, a Flower strategy, or a function of "
    "(y, grad, …), (x, delta, …) or (model, batches, …)"
)


class Function:
    """A function as a half of a method, called with the arguments that it names.

    A parameter without a default may also have the name of an option of the algorithm, and gets its value.
    """

    def __init__(self, name: str, function: Any, algorithm: Algorithm, options: Mapping[str, Any]) -> None:
        self.name, self.function, self.options = name, function, dict(options)
        self.parameters, _ = parameters_of(function)
        self.our_options = {key: getattr(algorithm, key) for key in options_of(type(algorithm))}
        check_options(name, function, options)
        self.half = self._half()

    def _half(self) -> Half:
        """Return which half the function is, by its parameters."""
        for half, names in HALF_PARAMETERS.items():
            if any(name in self.parameters for name in names):
                return half
        known = [name for names in HALF_PARAMETERS.values() for name in names]
        hint = next(filter(None, (nearest(name, known) for name in self.parameters)), "")
        taken = ", ".join(self.parameters) or "no arguments by name"
        raise BadInput(f"{self.name} takes {taken}{hint}: give {EXPECTED}")

    def __call__(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call the function and return the quantities in its result and in its state."""
        arguments = self._arguments(values)
        try:
            result = self.function(**arguments)
        except LaminaError:
            raise
        except (Exception, SystemExit) as error:
            raise BadInput(f"{self.name} fails: {describe_error(error)}") from error
        if result is None and "model" in arguments:
            result = arguments["model"]  # trained in place
        quantities = result._asdict() if hasattr(result, "_asdict") else result
        if not _names_quantities(quantities):
            quantities = {values["_model_name"]: quantities}
        return {**{key: value for key, value in values["state"].items() if is_array(value)}, **quantities}

    def _arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call: options, copies of our values, and values of our options."""
        arguments = dict(self.options)
        for key, parameter in self.parameters.items():
            if key in arguments:
                continue
            if key in values and not key.startswith("_"):
                arguments[key] = values[key] if key == "state" else copied(values[key])
            elif parameter.default is inspect.Parameter.empty:
                if key not in self.our_options:
                    known = sorted(each for each in values if not each.startswith("_"))
                    raise BadInput(
                        f"{self.name} takes '{key}'{nearest(key, [*known, *self.our_options])}: {TITLES[self.half]} "
                        f"may take {', '.join(known)}, options of ours, and what has a default or --theirs {key}=…"
                    )
                arguments[key] = self.our_options[key]
        return arguments


def check_options(name: str, function: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that a function or a class does not take."""
    parameters, takes_any = parameters_of(function)
    for key in options:
        if key not in parameters and not takes_any:
            raise BadInput(f"{name} takes no {key!r}{nearest(key, parameters)}")


def _names_quantities(result: Any) -> bool:
    """Return whether a result is a dict of quantities, and not of tensors by parameter's name, which is the model."""
    return isinstance(result, Mapping) and bool({"x", "y"} & set(result))
