"""Set-up of the data tests: a data set of the hub, pictures, a hostile pickle, and where the published files are."""

import os
import types
from pathlib import Path

import numpy as np
import pytest

from lamina.base.errors import BadInput
from lamina.data import load


def published_data() -> Path:
    """Where the real files are on this machine, if they are."""
    return Path(os.environ.get("LAMINA_DATA") or Path(__file__).parents[3] / "shared" / "data")


def one_line(refused: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(refused.value)
    assert "\n" not in text
    return text


def refusal(name: str, **options) -> str:
    """Return the message, of one line, with which `load` refuses these options."""
    with pytest.raises(BadInput) as refused:
        load(name, **options)
    return one_line(refused)


class FakeHubSplit:
    """The parts of `datasets.Dataset` that lamina uses."""

    def __init__(self, columns, classes=None):
        self.columns = columns
        self.column_names = list(columns)
        self.features = {"label": types.SimpleNamespace(num_classes=classes)} if classes else {}

    def with_format(self, _format):
        return self

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: v[key] for name, v in self.columns.items()}


def pictures(*modes, size=(4, 3)):
    Image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0)
    return [
        Image.fromarray(noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode) for mode in modes
    ]


class Attack:
    """Pickles to a call of something the reader must not call."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call
