"""Shakespeare's plays, by speaker."""

import hashlib

import numpy as np
import pytest
import torch

from data_setup import one_line, published_data
from lamina.base.errors import BadInput
from lamina.data import load
from lamina.data.readers import shakespeare


@pytest.fixture
def play(tmp_path, monkeypatch):
    """A play in which two speakers have enough text and one has not."""
    said = {"Ann": "to be or not to be ", "Bob": "that is the question "}
    scenes = [f"{name}:\n{words * 20}" for _ in range(3) for name, words in said.items()]
    path = tmp_path / "shakespeare" / "input.txt"
    path.parent.mkdir()
    path.write_text("\n\n".join([*scenes, "Cid:\nAy."]) + "\n")
    monkeypatch.setattr(shakespeare, "MD5", hashlib.md5(path.read_bytes()).hexdigest())
    return path


def test_speakers_are_clients_and_the_end_of_their_text_is_the_test_set(play, tmp_path):
    train, test = load("shakespeare", tmp_path)
    assert torch.equal(train.x, train.y)
    assert set(train.columns["speaker"]) == set(test.columns["speaker"]) == {"Ann", "Bob"}
    characters = sorted(set(play.read_text()))
    assert train.classes == len(characters)
    for name in ("Ann", "Bob"):
        windows = torch.cat([part.x[part.columns["speaker"] == name] for part in (train, test)])
        assert windows.shape[1] == shakespeare.CONTEXT
        text = [*windows[0].tolist(), *windows[1:, 1:].flatten().tolist()]  # each begins where the last one ended
        said = shakespeare.spoken(play.read_text())[name]
        assert "".join(characters[code] for code in text) == said[: len(text)]
        assert len(said) - len(text) < shakespeare.CONTEXT
    assert len(test) == pytest.approx(0.2 * (len(train) + len(test)), abs=2)


def test_a_damaged_file_is_refused(play, tmp_path):
    play.write_text("Ann:\nother words\n")
    with pytest.raises(BadInput) as refused:
        load("shakespeare", tmp_path)
    assert "md5" in one_line(refused)


@pytest.mark.skipif(not (published_data() / "shakespeare").exists(), reason="the published file is not here")
def test_the_published_file_has_181_speakers():
    train, test = load("shakespeare", published_data())
    assert len(np.unique(train.columns["speaker"])) == len(np.unique(test.columns["speaker"])) == 181
    assert train.classes == 65
