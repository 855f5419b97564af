"""Errors a user can act on: one line that says what is wrong and what to do."""

from __future__ import annotations

import difflib
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from lamina.base.text import printable

LONGEST_VALUE = 80  # characters of a value in a message
# path prefixes of files that are not the user's
LIBRARY_PREFIXES = ("<", f"{Path(__file__).parents[1]}/", f"{sysconfig.get_path('stdlib')}/")
EXTRAS = {"transformers": "transformers", "peft": "transformers", "datasets": "hub", "PIL": "images", "pandas": "table"}


class LaminaError(Exception):
    """Base of all errors lamina raises on purpose; its text is one clear line.

    `without_data` is the text for others than the owner of the data, where `message` quotes a value of them.
    """

    def __init__(self, *message: str, without_data: str | None = None) -> None:
        super().__init__(*message)
        self.without_data = without_data

    def __str__(self) -> str:
        return printable(super().__str__())  # names and values in it may hold anything


class BadInput(LaminaError, ValueError):
    """Something the user gave (a name, a value, a file, data) cannot be used as it is."""


class MissingExtra(LaminaError, ImportError):
    """An optional package is not installed; the text names the pip command that brings it."""


class Diverged(LaminaError, ArithmeticError):
    """Training produced a NaN or an infinity. Everything recorded before it is kept."""

    def __init__(self, message: str, *, round: int, client: int | None, layer: str) -> None:
        super().__init__(message)
        self.round = round
        self.client = client  # None: the server's own step went non-finite
        self.layer = layer


# Other libraries' words for names of lamina, without case, "-" and "_".
SYNONYMS = {
    "algorithm": ("optimizer", "optimiser", "strategy", "method"),
    "algorithms": ("optimizer", "optimiser", "optimizers", "strategy", "strategies", "method", "methods"),
    "augmentation": ("transform", "transforms"),
    "batch_size": ("bs", "minibatch"),
    "bound": ("clip", "clippingbound", "clippingnorm", "maxnorm", "maxgradnorm", "sensitivity"),
    "clip": ("maxgradnorm", "gradclip", "gradientclipping", "clipnorm"),
    "data": ("dataset",),
    "decay": ("weightdecay", "wd", "l2"),
    "device": ("gpu", "cuda"),
    "fedavg": ("sgd", "localsgd", "fedsgd"),
    "local_steps": ("steps", "iterations"),
    "loss": ("criterion", "lossfn", "lossfunction"),
    "lr": ("learningrate", "eta", "stepsize"),
    "model": ("net", "network"),
    "noise_multiplier": ("noise", "noisescale", "sigma"),
    "on_round": ("callback", "callbacks"),
    "out": ("outputdir", "outdir", "savedir", "logdir"),
    "overwrite": ("force",),
    "participation": ("fraction", "fractionfit", "frac", "samplerate"),
    "patience": ("earlystopping",),
    "progress": ("verbose",),
    "rounds": ("communicationrounds",),
    "schedule": ("scheduler", "lrscheduler"),
    "seed": ("randomstate", "manualseed", "randomseed"),
    "test": ("testdata", "testset", "val", "valdata", "validationdata"),
    "train": ("dataset", "traindata", "trainset"),
}
PREFIXES = ("num", "n", "nb", "max", "local", "client", "global")  # of such words: num_rounds, local_epochs


def nearest(name: str, known: Iterable[str], places: Mapping[str, str] | None = None) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to `name`, or an empty string.

    `places` has names that belong elsewhere, each with the text to return.

    >>> nearest("fedlam", ["fedavg", "fedlamb"])
    "; did you mean 'fedlamb'?"
    >>> nearest("learning_rate", ["clients", "lr"])
    "; did you mean 'lr'?"
    >>> nearest("num_rounds", ["clients"], {"rounds": ": give it to run"})
    ': give it to run'
    >>> nearest("zzz", ["fedavg"])
    ''
    """
    known, places = list(known), places or {}
    match = _closest(name, [*places, *known])  # of two that are equal without case, the last
    if match is not None and match in places and match not in known:
        return places[match]
    return f"; did you mean '{match}'?" if match else ""


def _closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is meant: another word for it, or the most similar one."""
    by_folded = {_folded(each): each for each in known}
    prefix, _, rest = name.lower().replace("-", "_").partition("_")
    for word in (_folded(name), *([_folded(rest)] if prefix in PREFIXES else [])):
        meant = [word, *(_folded(ours) for ours, words in SYNONYMS.items() if word in words)]
        for each in meant:
            if each in by_folded:
                return by_folded[each]
    match = difflib.get_close_matches(_folded(name), by_folded, n=1, cutoff=0.65)
    starts = [each for each in by_folded if len(name) > 2 and each.startswith(_folded(name))]  # acc for accuracy
    match = match or (starts if len(starts) == 1 else [])
    return by_folded[match[0]] if match else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def short_repr(value: Any) -> str:
    """Return a value as Python writes it, cut if it is long.

    >>> short_repr("a" * 100)[-4:], short_repr(16**5000), short_repr(0.1)
    ('aaa…', 'a number of 20001 bits', '0.1')
    """
    if isinstance(value, int) and value.bit_length() > 4 * LONGEST_VALUE:  # Python refuses to write thousands of digits
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except ValueError:  # such a number inside
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, numpy's among them."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a number, numpy's among them; not an int beyond the range of a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


TABLE_FILES = (".csv", ".parquet")
USER_DEFINED = ("algorithm", "data set", "loss", "metric", "model")  # can be the user's, by "module:name"


def unknown(what: str, name: str, known: Iterable[str]) -> BadInput:
    """Build the error for a name that is not in a registry."""
    known, name = sorted(known), str(name)
    hint = nearest(name, known)
    module, _, attribute = name.rpartition(".")
    if what == "data set" and name.lower().endswith(TABLE_FILES):
        hint = f"; read a file with lamina.data.load('table', path='{name}', label=…)"
    elif not hint and what in USER_DEFINED and all(part.isidentifier() for part in (*module.split("."), attribute)):
        hint = f"; your own is named '{module}:{attribute}', with a colon"
    return BadInput(f"unknown {what} '{name}'{hint} (known: {', '.join(known)})")


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtra:
    """Build the error for an optional package that is not installed."""
    return MissingExtra(f"{purpose} needs {package}: pip install -e '.[{extra}]'")


def where_it_failed(error: BaseException) -> str:
    """Return the innermost line of the user's own code that an exception passed, as ``"mine.py:29"``; "" if none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_package = {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
        if not is_package and not frame.filename.startswith(LIBRARY_PREFIXES):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def describe_error(error: BaseException) -> str:
    """Describe an exception of the user's code in one line: its type, message, place and a missing extra."""
    where = where_it_failed(error)
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}{f' ({where})' if where else ''}{extra_hint(error)}"


def takes(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a function of the user's can be called with these arguments, as far as its signature tells.

    >>> takes(lambda batch: batch, "batch", "generator")
    False
    """
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        pass
    return True


def extra_hint(error: BaseException) -> str:
    """Return how to install a package that could not be imported, if an extra of lamina has it; else nothing."""
    extra = EXTRAS.get(str(error.name).partition(".")[0]) if isinstance(error, ModuleNotFoundError) else None
    return f": pip install -e '.[{extra}]'" if extra else ""
