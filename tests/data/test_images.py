"""Pictures (PIL), in lists and in files, have 8 bits per channel."""

import re

import pytest

import lamina
from data_setup import pictures
from lamina.data import as_dataset


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_pictures_of_more_than_8_bits_are_refused(mode, tmp_path):
    wide = pytest.importorskip("PIL.Image").new(mode, (4, 3), 300)
    advice = "convert it to 8 bits, or give the pixels as arrays of floats"
    for first in pictures("L", "RGB"):
        with pytest.raises(lamina.BadInput, match=f"^data: x: image 1 has more than 8 bits per channel.*{advice}"):
            as_dataset(([first, wide], [0, 1]))
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number, picture in enumerate(pictures("L", "L")):
            picture.save(tmp_path / name / f"{number}.tif")
    file = tmp_path / "dog" / "1.tif"
    wide.save(file)
    for options in ({}, {"size": [2, 2]}):
        with pytest.raises(lamina.BadInput, match=rf"^{re.escape(str(file))} has more than 8 bits .*{advice}"):
            lamina.data.load("images", path=str(tmp_path), **options)


def test_pictures_of_8_bits_are_read_as_before():
    for mode, channels in {"1": 1, "L": 1, "LA": 1, "RGB": 3, "RGBA": 3, "CMYK": 3}.items():
        assert as_dataset((pictures(mode, mode), [0, 1])).x.shape == (2, channels, 3, 4)
