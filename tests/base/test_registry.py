"""Objects by name: unknown names and options, missing options, and objects of the user's modules."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lamina import models
from lamina.base.errors import BadInput
from lamina.base.registry import create_named, field_values, import_named, parameters_of


@dataclasses.dataclass
class Step:
    size: float
    depth: int = 2


KINDS = {"step": Step}


def test_an_object_is_created_with_its_options_and_defaults():
    assert create_named("shape", KINDS, "step", {"size": 0.5}) == Step(0.5, 2)
    assert field_values(Step(0.5)) == {"size": 0.5, "depth": 2}
    assert field_values(object()) == {}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("stepp", {}, "unknown shape 'stepp'; did you mean 'step'? (known: step)"),
        (
            "step",
            {"size": 1, "dept": 3},
            "shape 'step' has no option 'dept'; did you mean 'depth'? (its options: size, d",
        ),
        ("step", {"depth": 3}, "shape 'step' needs the option 'size'"),
    ],
)
def test_a_wrong_name_or_option_is_refused(name, options, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        create_named("shape", KINDS, name, options)


def test_parameters_that_can_be_given_by_name():
    named, takes_others = parameters_of(lambda first, /, second, *rest, third=3: None)
    assert (list(named), takes_others) == (["second", "third"], False)
    named, takes_others = parameters_of(lambda second, **others: None)
    assert (list(named), takes_others) == (["second"], True)


def test_a_module_that_raises_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "exits_at_once.py").write_text("\nraise SystemExit('no\\nmore')\n")
    message = r"cannot load the loss 'exits_at_once:loss': SystemExit: no more \(exits_at_once\.py:2\)$"
    with pytest.raises(BadInput, match=message):
        import_named("loss", "exits_at_once:loss")


def test_a_missing_module_is_named_with_the_searched_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput, match=re.escape(f"No module named 'sag' in '{tmp_path}' or among installed")):
        models.find("sag:make")
    (tmp_path / "imports_another.py").write_text("import no_such_package")
    with pytest.raises(BadInput, match=r"No module named 'no_such_package'$"):  # theirs was found
        models.find("imports_another:make")
