"""The experiment file: TOML, validated, with one clear line for whatever is wrong with it."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lamina import algorithms, models
from lamina.base.errors import BadInput, is_number, is_whole, nearest, short_repr
from lamina.base.limits import LEAST_SEED, MOST, MOST_BATCH, MOST_SEED, MOST_SEEDS, MOST_THREADS
from lamina.channel.channel import as_channel, places_of_options
from lamina.channel.privacy import as_privacy
from lamina.engines.choice import EngineName
from lamina.experiment.objects import Objects
from lamina.experiment.sections import Data, Fraction, Named, default_name
from lamina.experiment.toml import read_tree, set_keys
from lamina.objective.losses import LOSSES
from lamina.rounds.clock import Clock, make_clock
from lamina.rounds.settings import TrainSettings

EXAMPLES = {  # of sections that are mistaken for single values
    "channel": '{ codec = "qsgd" }',
    "clock": '{ name = "4g" }',
    "privacy": "{ bound = 1.0, epsilon = 8, delta = 1e-5 }",
}
NO_OBJECTS = Objects()  # one for all experiments, so that two with the same settings are equal
Positive = Annotated[float, Field(gt=0)]
AtLeastOne = Annotated[int, Field(ge=1, le=MOST)]


def _batch_size(value: Any) -> Any:
    if value == "full" or (is_whole(value) and 1 <= value <= MOST_BATCH):
        return value
    raise PydanticCustomError("batch_size", f'must be a whole number from 1 to {MOST_BATCH}, or "full"')


def _loss(name: str) -> str:
    if ":" not in name and name not in LOSSES:  # a function of the user's own is imported when the run starts
        names = ", ".join(LOSSES)
        raise PydanticCustomError("loss", f"must be {names} or module:function{nearest(name, LOSSES)}")
    return name


BatchSize = Annotated[int | Literal["full"], PlainValidator(_batch_size)]  # "full": all of a client's samples


Item = TypeVar("Item")
NotEmpty = Annotated[list[Item], Field(min_length=1)]
OneOrMore = Annotated[NotEmpty[str] | None, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class AlgorithmSection(Named):
    """The `[algorithm]` section."""

    preset: str | None = None


class _Train(_Section):
    rounds: AtLeastOne = 50
    patience: AtLeastOne | None = None  # evaluations without a better value after which the run stops
    metrics: OneOrMore = None  # names or module:function; the first is the primary one

    @model_validator(mode="after")
    def _one_length(self) -> _Train:
        if getattr(self, "local_steps", None) is not None and "epochs" in self.model_fields_set:
            raise PydanticCustomError("both", "has epochs and local_steps, which say the same: take one out")
        return self


if TYPE_CHECKING:

    class Train(_Train):
        """The `[train]` section: the number of rounds, and the fields of `TrainSettings`."""

        def __getattr__(self, name: str) -> Any: ...
else:
    # The fields of `TrainSettings` with its types, bounds and defaults, except for those that a file writes otherwise.
    _fields = {
        each.name: (
            Annotated[get_type_hints(TrainSettings)[each.name], Field(**each.metadata.get("bounds", {}))],
            each.default,
        )
        for each in dataclasses.fields(TrainSettings)
        if each.name not in ("augmentation", "channel", "privacy", "clock")  # in sections of their own
    } | {
        "lr": (Positive | None, None),  # None: the algorithm's own default
        "participation": (Annotated[float, Field(gt=0, le=1)], 0.5),
        "batch_size": (BatchSize, 32),
        "epochs": (AtLeastOne, 1),
        "schedule": (Annotated[Named, default_name("train", "schedule")], Named(name="constant")),
        "aggregation": (Annotated[Named, default_name("train", "aggregation")], Named(name="mean")),
        "loss": (Annotated[str, AfterValidator(_loss)], "cross_entropy"),
        "private": (list[str] | None, None),
        "seed": (Annotated[int, Field(ge=LEAST_SEED, le=MOST_SEED)], 0),
    }
    Train = create_model("Train", __base__=_Train, __doc__="The `[train]` section.", **_fields)


class ChannelSection(_Section):
    """The `[channel]` section: what an upload passes on its way to the mean."""

    codec: Any = "none"  # a name, a table with a name and options, or a list of those
    fields: dict[str, Any] = {}  # other codecs for single fields of the upload
    feedback: bool = False
    down: Literal["bf16"] | None = None

    @model_validator(mode="after")
    def _is_a_channel(self) -> ChannelSection:
        try:
            as_channel(self.model_dump())
        except BadInput as error:
            raise PydanticCustomError("options", "{line}", {"line": str(error)}) from error
        return self


def _bound(value: Any) -> Any:
    """Return a bound, or a table of them, as floats; `Privacy` refuses what is neither."""
    if isinstance(value, dict):
        return {name: _bound(each) for name, each in value.items()}
    return float(value) if is_number(value) else value


class PrivacySection(_Section):
    """The `[privacy]` section: differential privacy for clients."""

    bound: Annotated[Any, PlainValidator(_bound)]  # a number, or one for each field
    delta: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    rounds: AtLeastOne | None = None  # None: train.rounds
    secret_cohorts: bool = True
    bands: int = 1
    secret: str | None = None
    debias: bool = False
    quantile: float | None = None
    bound_rate: float = 0.2
    count_noise: float | None = None
    noise_id: str | None = Field(default=None, exclude=True)  # in a run's config.json: tells the secret from others

    @model_validator(mode="after")
    def _is_possible(self) -> PrivacySection:
        try:
            as_privacy(self.model_dump())
        except BadInput as error:
            raise PydanticCustomError("options", "{line}", {"line": str(error)}) from error
        return self


class Run(_Section):
    """The `[run]` section: where and how training runs, and what is recorded."""

    device: str = "auto"
    engine: EngineName = "auto"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    deterministic: bool = False  # on a GPU: the same bits in every run on the same machine
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] | None = None  # None: chosen from the size of the model
    evaluate_every: AtLeastOne = 1
    client_metrics: bool = False
    trust_ratios: bool = False
    diagnostics: list[str] | None = None  # in the rounds that are evaluated
    checkpoint_every: AtLeastOne = 1  # rounds
    accept_changed_code: bool = False  # resume a run although the user's code has changed
    out: str | None = None  # None: runs/<file>-<algorithm>-seed<seed>


class ClockSection(BaseModel):
    """The `[clock]` section: the name of a clock, and the fields of `lamina.Clock`, which validates them."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str | None = None

    def table(self) -> dict[str, Any]:
        """Return the section as an argument of `Simulation`."""
        return {"name": self.name, **(self.model_extra or {})}


class Tried(BaseModel):
    """The values that a comparison tries for one algorithm: rates, and values of its options."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, strict=True)
    __pydantic_extra__: dict[str, NotEmpty[Any]]
    lr: NotEmpty[Positive] | None = None  # None: the one rate of all runs

    def values(self) -> dict[str, list[Any]]:
        """Return the given values, the rates first."""
        return {name: values for name, values in self.model_dump().items() if values is not None}


class Compare(_Section):
    """The `[compare]` section: several algorithms on the same clients, batches and initial weights."""

    algorithms: list[str] = ["fedavg", "fedams", "fedlamb", "mimelamb", "fedlada"]
    seeds: Annotated[int, Field(ge=1, le=MOST_SEEDS)] = 3
    target: float = 0.9  # value of the primary metric on the test data to stay at
    grid: dict[str, Tried] = {}  # what to try for each; the best combination is kept
    select: Literal["validation", "test"] = "validation"  # what it is chosen on; the papers take the test data
    validation: Fraction = 0.2  # of the training data, held out to choose on
    # Rounds of the runs that only help to choose; None: train.rounds; several: stages, each of which drops some runs.
    tuning_rounds: Annotated[
        list[AtLeastOne] | None, BeforeValidator(lambda value: [value] if isinstance(value, int | float) else value)
    ] = None
    # Further options of each method. If they name the algorithm (`name`), the method may have any name.
    options: dict[str, dict[str, Any]] = {}

    def algorithm_of(self, label: str) -> str:
        """Return the name of the algorithm that `algorithms` lists under a label: the label itself, unless given."""
        return str(self.options.get(label, {}).get("name", label))


def _all_differ(key: str, read: Callable[[Any], Any]) -> AfterValidator:
    """Return the check that a list of `[frontier]` has only values that can be read, each once."""

    def check(given: list[Any]) -> list[Any]:
        try:
            values = list(map(read, given))
        except BadInput as error:
            raise PydanticCustomError("options", "frontier.{key}: {line}", {"key": key, "line": str(error)}) from error
        for place, value in enumerate(values):
            if value in values[:place]:
                same = {"key": key, "value": short_repr(given[place])}
                raise PydanticCustomError("options", "frontier.{key}: {value} is the same as one before it", same)
        return given

    return AfterValidator(check)


class FrontierSection(_Section):
    """The `[frontier]` section: what each method of `[compare]` is trained with, and on which networks it is timed."""

    # each as the `channel` of a simulation; None: that of [channel]
    channels: Annotated[NotEmpty[Any], _all_differ("channels", as_channel)] | None = None
    # levels of privacy, which are trained with the codec of [channel]
    epsilons: Annotated[NotEmpty[Positive], _all_differ("epsilons", float)] | None = None
    clocks: Annotated[NotEmpty[str], _all_differ("clocks", make_clock)] | None = None  # names
    step_seconds: Annotated[float, Field(ge=0)] = 0.0  # for the gradient of one mini-batch, on all clocks


class Tune(_Section):
    """The `[tune]` section: values to try, and the data to choose the best on."""

    grid: dict[str, Any] | str = {}  # dotted keys to lists of values, or the name of a paper's grid
    sampler: Literal["grid", "tpe"] = "grid"  # tpe: Optuna proposes values from the space
    space: dict[str, Any] = {}  # dotted keys to {low, high, log}, {choices} or a list
    trials: AtLeastOne = 50  # of the sampler; a grid has as many as it has points
    pruner: Literal["none", "median", "hyperband"] = "none"
    seeds: Annotated[int, Field(ge=1, le=MOST_SEEDS)] = 1  # the mean over them decides
    select: Literal["validation", "test"] = "validation"  # the papers take the test data
    validation: Fraction = 0.2  # of the training data, held out to choose on


class Claim(_Section):
    """A `[[claim]]` section: what a paper says of a comparison, for `lamina reproduce` to check.

    A label is an algorithm, or ``algorithm@variant``; ``a - b`` stands for the difference of two.
    """

    model_config = ConfigDict(allow_inf_nan=True)  # a paper's "never" is inf

    text: str
    kind: Literal["order", "rounds_to", "gap"]
    expect: list[str | list[str]]  # labels, the best first; an inner list is a tie, "*" a list of all others
    metric: str = "accuracy"  # a column of the metrics
    at: Literal["final", "best", "last"] | AtLeastOne = "final"  # order, gap: final is the mean of the last ten rounds
    within: AtLeastOne | None = None  # compare the first `within` rounds only, for runs of unequal length
    lower_is_better: bool = False  # order, gap
    target: float | None = None  # rounds_to: to stay at
    at_least: float | None = None  # gap: of the first over each of the others
    at_most: float | None = None  # gap: either way
    paper: dict[str, float] = {}  # the paper's numbers by label, as printed: accuracies in per cent
    variants: dict[str, list[str]] = {}  # name -> what is set differently, section.key=value


class Experiment(_Section):
    """One experiment file."""

    data: Data = Data()
    model: Annotated[Named, default_name("model")] = Named(name="mlp")
    algorithm: Annotated[AlgorithmSection, default_name("algorithm")] = AlgorithmSection(name="fedlamb")
    train: Train = Train()
    channel: ChannelSection = ChannelSection()
    privacy: PrivacySection | None = None
    run: Run = Run()
    clock: Annotated[
        ClockSection | None, BeforeValidator(lambda clock: {"name": clock} if isinstance(clock, str) else clock)
    ] = None
    compare: Compare = Compare()
    frontier: FrontierSection | None = Field(default=None, exclude=True)  # the folder of all its runs has it
    tune: Tune = Field(default=Tune(), exclude=True)  # a run's configuration does not say what else was tried
    claim: list[Claim] = Field(default=[], exclude=True)  # changes nothing in a run, so no run's folder depends on it
    _objects: Objects = PrivateAttr(default_factory=lambda: NO_OBJECTS)  # passed from Python: no file holds them

    @model_validator(mode="after")
    def _claims_name_algorithms(self) -> Experiment:
        """Replace "*" in claims by a list of the algorithms that the claim does not name."""
        for claim in self.claim:
            labels = [label for group in claim.expect for label in ([group] if isinstance(group, str) else group)]
            named = {label.partition("@")[0] for label in labels}
            others: list[str | list[str]] = [[name for name in self.compare.algorithms if name not in named]]
            claim.expect[:] = [each for group in claim.expect for each in (others if group == "*" else [group])]
        return self

    @property
    def objects(self) -> Objects:
        """Return the objects that replace names."""
        return self._objects

    def changed(self, **sections: Mapping[str, Any]) -> Experiment:
        """Return the experiment with other values of some keys, given by section; they are not validated."""
        updated = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=updated)

    def with_objects(self, objects: Objects) -> Experiment:
        """Return the same experiment with objects in place of names."""
        changed = self.model_copy()
        changed._objects = objects
        return changed


def load(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read and validate an experiment file, with ``section.key=value`` overrides applied first."""
    return parse(set_keys(read_tree(Path(path)), dict(map(parse_override, overrides))), source=str(path))


def parse(tree: Mapping[str, Any], source: str = "experiment") -> Experiment:
    """Validate an experiment given as nested dicts."""
    try:
        return Experiment.model_validate(dict(tree))
    except ValidationError as error:
        raise BadInput(f"{source}: {_one_line(error)}") from error


def parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    """Return the names and the value of ``section.key=value``; the value is TOML, and a bare word is a string.

    >>> parse_override("train.lr=0.5"), parse_override("algorithm.name=fedlada")
    ((('train', 'lr'), 0.5), (('algorithm', 'name'), 'fedlada'))
    """
    key, equals, text = override.partition("=")
    names = tuple(key.strip().split("."))
    if not equals or not all(names):
        raise BadInput(f"--set '{override}' is not of the form section.key=value, for example train.lr=0.1")
    try:
        return names, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return names, text.strip()
    except (ValueError, RecursionError) as error:  # thousands of digits, thousands of brackets
        raise BadInput(f"--set {short_repr(override)}: {error}") from error


def key_places(*others: str) -> dict[str, str]:
    """Return the dotted key for every name in a run's sections, and for the options of lamina's algorithms and models.

    `others` are further sections, whose names come first.

    >>> key_places()["rounds"], key_places()["decay"], key_places()["model"]
    ('train.rounds', 'algorithm.decay', 'model.name')
    """
    options = [name for algorithm in algorithms.registry().values() for name in algorithms.options(algorithm)]
    names: dict[str, Iterable[str]] = {
        "model": [name for model in models.registry().values() for name in model.options],
        "algorithm": options,
        **{name: kind.model_fields for name, kind in (("run", Run), ("data", Data), ("train", Train))},
        "clock": Clock.__dataclass_fields__,
        **{name: cast(Any, Experiment.model_fields[name].annotation).model_fields for name in others},
    }
    places = {name: f"{section}.{name}" for section, known in names.items() for name in known if name != "name"}
    return places | {section: f"{section}.name" for section in ("data", "model", "algorithm")}


def _one_line(error: ValidationError) -> str:
    """Return the first problem as a line: the key, what is wrong, what is allowed, the nearest match."""
    problems = error.errors()
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")  # it may be a key that is missing
    place = [str(part) for part in first["loc"]]
    dotted = ".".join(place)
    if first["type"] == "options":
        text = first["msg"]
    elif first["type"] == "extra_forbidden":
        model: Any = Experiment
        for name in place[:-1]:  # a number is a place in a list of sections
            model = get_args(model)[0] if name.isdigit() else model.model_fields[name].annotation
            if type(None) in get_args(model):  # a section that may be left out
                model = get_args(model)[0]
        known = [name for name in model.model_fields if name != "noise_id"]  # which lamina writes
        where = f"[{'.'.join(place[:-1])}]" if place[:-1] else "the file"
        elsewhere = {name: f"; did you mean '{key}'?" for name, key in key_places().items()}
        elsewhere |= places_of_options() if place[:-1] == ["channel"] else {}
        own = nearest(place[-1], known) if place[:-1] else ""  # clip in [privacy] is its bound, not train.clip
        hint = own or nearest(place[-1], known, elsewhere)
        text = f"{where} has no key '{place[-1]}'{hint} (keys: {', '.join(known)})"
    elif first["type"] == "missing":
        text = f"[{'.'.join(place[:-1])}] needs '{place[-1]}'"
    else:
        given = f" = {short_repr(first['input'])}" if not isinstance(first["input"], dict) else ""
        texts = {"model_type": "must be a table", "dict_type": "must be a table", "list_type": "must be a list",
                 "too_short": "must not be empty"}  # fmt: skip
        if first["type"] == "list_type" and isinstance(first["input"], str):
            texts["list_type"] += f", {short_repr([first['input']])}"
        texts["model_type"] += f", such as {EXAMPLES[dotted]}" if dotted in EXAMPLES else ""
        message = first["msg"].removeprefix("Value error, ")
        problem = texts.get(first["type"], message[:1].lower() + message[1:])
        text = f"{dotted}{given}: {problem}"
    return text + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
