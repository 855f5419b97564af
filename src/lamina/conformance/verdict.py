"""Compare named quantities of both sides step by step, and say where they first differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina.base.text import listed, plural
from lamina.objective.layers import Layers

MAX_RATIO_SPREAD = 1e-4  # of the coordinates' ratios, relative to their mean: rounding in float32 is below it
# A tolerance for theirs that compute in a type, above the rounding of some steps.
TOLERANCES = {torch.float32: "1e-5", torch.float16: "1e-2", torch.bfloat16: "1e-1"}
FLOAT32_STEP = 2.0**-23  # the largest relative rounding of one operation


@dataclass(frozen=True)
class Difference:
    """The first difference of a quantity: its place and its size."""

    quantity: str
    round: int
    client: int | None  # None: on the server
    step: int | None  # of the round, from 1; None: a whole round
    size: float  # the largest absolute difference
    relative: float  # the same, divided by the largest entry of both sides
    entry: str  # where it is, such as "fc.weight[3]"
    ours: float
    theirs: float

    @property
    def place(self) -> str:
        """The round, the client and the step, in words."""
        parts = [f"round {self.round}"]
        parts += [f"client {self.client}"] * (self.client is not None)
        parts += [f"step {self.step}"] * (self.step is not None)
        return ", ".join(parts)

    def __str__(self) -> str:
        if not math.isfinite(self.size):
            return f"{self.quantity} is not finite ({self.entry}: ours {self.ours:.9g}, theirs {self.theirs:.9g})"
        return (
            f"{self.quantity} by {self.size:.3g}, {self.relative:.2g} of its largest entry "
            f"({self.entry}: ours {self.ours:.9g}, theirs {self.theirs:.9g})"
        )


@dataclass(frozen=True)
class Conformance:
    """The result of a comparison; `print` shows it in words."""

    ours: str  # the algorithm, its options and its half
    theirs: str  # the other implementation and its options
    version: str  # of its package, or ""
    steps: int
    rounds: int
    tolerance: float
    quantities: tuple[str, ...]  # that both sides have, the model first
    largest: float  # relative difference of the model, up to its first difference
    difference: Difference | None  # of the model
    others: tuple[Difference, ...]  # the first differences of further quantities, as far as the comparison went
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether the model is the same after every step."""
        return self.difference is None

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        if self.difference is None:
            return f"the same to {self.tolerance:g} over {self.length}"
        return f"differs first in {self.difference.place}: {self.difference}"

    @property
    def length(self) -> str:
        """The number of steps, and the number of rounds if it differs, in words."""
        rounds = f" ({plural(self.rounds, 'round')})" if self.rounds != self.steps else ""
        return f"{plural(self.steps, 'step')}{rounds}"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, the verdict and whether the two are the same, as plain values."""
        return {"same": self.same, "verdict": self.verdict, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        version = f" ({self.version})" if self.version else ""
        lines = [f"ours:   {self.ours}", f"theirs: {self.theirs}{version}", self.verdict]
        model, *others = self.quantities
        differing = {other.quantity: other for other in self.others}
        if self.same:
            lines.append(f"  largest relative difference of {model}: {self.largest:.2g}")
        if agreeing := [name for name in others if name not in differing]:
            lines.append(f"  {listed(agreeing)}: the same{'' if self.same else ' up to there'}")
        lines += [f"  {other} in {other.place}" for other in self.others]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


class Comparison:
    """The progress of a comparison: the quantities compared so far, and their first differences."""

    def __init__(self, model: str, layers: Layers, tolerance: float) -> None:
        self.model, self.layers, self.tolerance = model, layers, tolerance
        self.largest = 0.0
        self.first: dict[str, Difference] = {}
        self.compared: dict[str, None] = {model: None}  # in the order of their first appearance
        self.of_step: float | None = None  # the difference, relative to the largest entry of our step
        self.ratio: float | None = None  # of their step to ours, if all coordinates have the same
        self.of_model: float | None = None  # the difference, relative to the model, if all coordinates have the same

    @property
    def is_over(self) -> bool:
        """Whether the models differ, which ends a comparison."""
        return self.model in self.first

    def check(
        self,
        ours: Mapping[str, Tensor | None],
        theirs: Mapping[str, Tensor],
        *,
        before: tuple[Tensor, Tensor],
        round: int,
        client: int | None = None,
        step: int | None = None,
    ) -> None:
        """Compare all quantities that both sides have; `before` are both models before the step."""
        for name in sorted(theirs, key=lambda name: name != self.model):
            our_value = ours.get(name)
            if our_value is None or our_value.numel() != theirs[name].numel():
                continue
            self.compared[name] = None
            size, relative, index = gap(our_value, theirs[name])
            if name == self.model and relative <= self.tolerance:
                self.largest = max(self.largest, relative)
            if name not in self.first and not relative <= self.tolerance:  # also if theirs is NaN
                values = (float(our_value.flatten()[index]), float(theirs[name].flatten()[index]))
                entry = self._entry(index) if our_value.numel() == self.layers.size else f"[{index}]"
                self.first[name] = Difference(name, round, client, step, size, relative, entry, *values)
                if name == self.model:
                    our_step = our_value - before[0]
                    self.ratio = common_ratio(our_step, theirs[name] - before[1])
                    self.of_model = common_ratio(before[0], theirs[name] - our_value)
                    self.of_step = size / largest if (largest := float(our_step.abs().max())) else None

    def notes(self, model_types: Set[torch.dtype]) -> Iterator[str]:
        """Yield possible explanations of the model's first difference.

        `model_types` are the types in which the other implementation returns the model.
        """
        difference = self.first[self.model]
        if not math.isfinite(difference.size):
            return
        if self.of_step is not None:
            yield f"that is {self.of_step:.2g} of the largest entry of our step"
        if self.ratio == 0:
            yield "theirs leaves the model as it is"
        elif self.ratio is not None and f"{self.ratio:.6g}" != "1":
            yield f"their step there is {self.ratio:.6g} times ours, in every coordinate"
        elif self.of_model is not None:
            share = f"{self.of_model:.6g} times the model before the step"
            yield f"the difference is {share}, in every coordinate: do the weight decays differ?"
        tolerances = [TOLERANCES[kind] for kind in model_types if kind in TOLERANCES]
        tolerance = max(tolerances, key=float, default="0")
        if difference.relative < float(tolerance):
            kinds = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in model_types))
            yield f"theirs computes in {kinds}, whose rounding this may be: a tolerance of {tolerance} allows for it"
        elif not tolerances and difference.relative < FLOAT32_STEP:
            tolerance = TOLERANCES[torch.float32]
            yield f"this may be rounding to float32 within theirs: a tolerance of {tolerance} allows for it"

    def _entry(self, index: int) -> str:
        """Return the name of an element of the flat vector, such as "fc.weight[3]"."""
        for name, size in zip(self.layers.names, self.layers.sizes, strict=True):
            if index < size:
                return f"{name}[{index}]"
            index -= size
        raise IndexError(index)


def gap(ours: Tensor, theirs: Tensor) -> tuple[float, float, int]:
    """Return the largest difference, the same relative to the largest entry of both, and where it is.

    >>> gap(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    (2.0, 0.5, 1)
    """
    ours, theirs = ours.flatten(), theirs.flatten()
    differences = (ours - theirs).abs()
    index = int(torch.where(differences.isnan(), torch.inf, differences).argmax())
    size = float(differences[index])
    scale = max(float(ours.abs().max()), float(theirs.abs().max()))
    return size, size / scale if scale else size, index


def common_ratio(ours: Tensor, theirs: Tensor) -> float | None:
    """Return the ratio of two steps if it is the same in all coordinates, else None.

    >>> common_ratio(torch.tensor([1.0, -2.0, 0.0]), torch.tensor([10.0, -20.0, 0.0]))
    10.0
    """
    is_large = ours.abs() > 1e-3 * ours.abs().max()  # smaller steps are mostly rounding
    if not bool(is_large.any()):
        return None
    ratios = theirs[is_large] / ours[is_large]
    mean = float(ratios.mean())
    spread = float((ratios - mean).abs().max())
    return mean if spread <= MAX_RATIO_SPREAD * abs(mean) else None
