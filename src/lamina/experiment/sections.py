"""The sections of an experiment file that name something: a data set, a model, an algorithm, a partition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from lamina.base.errors import BadInput, is_number, is_whole
from lamina.base.limits import MOST_CLIENTS
from lamina.base.registry import field_values
from lamina.data.feed import Augment, Fill
from lamina.data.readers import sources
from lamina.data.readers.own import FORMATS
from lamina.rounds.settings import own_name

# The tables that name something, with the default name; their other keys are the options of the thing they name.
DEFAULT_NAMES = {
    ("data", "partition"): "iid",
    ("model",): "mlp",
    ("algorithm",): "fedlamb",
    ("train", "schedule"): "constant",
    ("train", "aggregation"): "mean",
}


def _heldout_clients(value: Any) -> Any:
    is_list = isinstance(value, list) and len(value) > 0
    if (is_number(value) and 0 < value < 1) or (is_list and all(is_whole(each) and each >= 0 for each in value)):
        return value
    if is_list and all(isinstance(each, str) for each in value):
        return value
    options = "a list of clients' numbers ([3, 7]) or of values of the client column in quotes"
    raise PydanticCustomError("heldout_clients", f"must be a fraction above 0 and below 1, or {options}")


def _augment(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and ":" in value):
        return value
    raise PydanticCustomError("augment", 'must be true, false, or a function of yours, "module:function"')


HeldoutClients = Annotated[float | list[int] | list[str], PlainValidator(_heldout_clients)]


Fraction = Annotated[float, Field(gt=0, lt=1)]


class Named(BaseModel):
    """A section that names something in a registry; its other keys are that thing's options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    def options(self) -> dict[str, Any]:
        """Return the options given beside the name."""
        return dict(self.model_extra or {})


def default_name(*place: str) -> BeforeValidator:
    """Return what completes the table of a `Named` section: with its default name, or from a name alone."""

    def complete(table: Any) -> Any:
        if isinstance(table, str):  # partition = "iid"
            return {"name": table}
        return {"name": DEFAULT_NAMES[place], **table} if isinstance(table, Mapping) else table

    return BeforeValidator(complete)


class Data(Named):
    """The `[data]` section: the data set and how it is split among clients; its other keys are options of the data."""

    model_config = ConfigDict(allow_inf_nan=False, strict=True)

    name: str = "digits"
    dir: str | None = None
    # None: 10, or as many as the column names (by-column)
    clients: Annotated[int, Field(ge=1, le=MOST_CLIENTS)] | None = None
    client: str | None = None  # the column of natural clients, which are the partition unless another is given
    partition: Annotated[Named, default_name("data", "partition")] = Named(name="iid")
    augment: Annotated[bool | str, PlainValidator(_augment)] = False  # a function of the user's, by name
    augment_pad: Annotated[int, Field(ge=0)] = 4
    augment_flip: bool = True
    augment_crop_probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    augment_fill: Fill = "black"
    test_crop_pad: Annotated[int, Field(ge=1)] | None = None  # adds the test set "cropped": images cropped at random
    validation: Fraction | None = None  # of the training data, held out and evaluated on instead of the test data
    heldout_clients: HeldoutClients | None = None  # never train: a fraction, numbers, or values of the client column
    local_test: Fraction | None = None  # of every client's samples, to evaluate on

    @model_validator(mode="before")
    @classmethod
    def _natural_partition(cls, tree: Any) -> Any:
        """Make the natural clients the partition, unless another one is given."""
        if not isinstance(tree, Mapping) or tree.get("partition") is not None:
            return tree
        column = tree.get("client")
        return {**tree, "partition": {"name": "by-column", "column": column}} if isinstance(column, str) else tree

    @model_validator(mode="after")
    def _options_are_known(self) -> Data:
        if self.name in FORMATS or self.model_extra:
            other_keys = {key: getattr(self, key) for key in type(self).model_fields if key != "name"}
            try:
                sources.check_options(self.name, self.options(), other_keys)
            except BadInput as error:
                raise PydanticCustomError("options", "{line}", {"line": str(error)}) from error
        return self

    @model_validator(mode="after")
    def _augment_is_set(self) -> Data:
        if isinstance(self.augment, bool) and "augment" in self.model_fields_set:  # false says that they do not act
            return self
        keys = {key: field.default for key, field in type(self).model_fields.items() if key.startswith("augment_")}
        unused = sorted(keys.keys() & self.model_fields_set)
        if isinstance(self.augment, str):  # a run's config.json has all keys, at their defaults
            unused = [key for key in unused if getattr(self, key) != keys[key]]
        if unused:
            raise PydanticCustomError(
                "unused", "{keys} needs augment = true: add it, or take {keys} out", {"keys": " and ".join(unused)}
            )
        return self


def augment_keys(augmentation: Any) -> dict[str, Any]:
    """Return the keys of `[data]` that stand for an augmentation; none without one."""
    if augmentation is None:
        return {}
    if not isinstance(augmentation, Augment):
        return {"augment": own_name(augmentation)}
    return {"augment": True} | {f"augment_{name}": value for name, value in field_values(augmentation).items()}
