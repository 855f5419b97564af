"""Saved models and a node's state carry a checksum: a flipped bit is noticed when the file is read."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lamina
from flower_setup import NODE, Setup, assert_weights, client_of, is_train, reference
from helpers import call, rows, sets
from lamina.base.errors import BadInput
from lamina.storage.checkpoint import UNREADABLE, pack, read_facts, read_model, unpack


def flip(path, place, bit=6):
    """Flip a bit of a file; `place` counts from its end if it is negative."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def places(path):
    """In the header's length, in the header, at the start, in the middle and at the end of the numbers."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return [0, 9, start // 2, start, (start + len(data)) // 2, len(data) - 1]


def test_every_flipped_bit_is_noticed_or_changes_nothing():
    """Every bit of a small file. What may change unnoticed is the key of the checksum, with intact content."""
    tensors = {
        "w": torch.tensor([[1.0, -2.0]]),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "odd": torch.tensor([1 + 2j]),
        "none": torch.zeros(0),
    }
    data = pack(tensors, round="7")
    assert all(pack(tensors, round="7") == data for _ in range(20))
    assert read_facts(data)["round"] == "7"
    unnoticed = 0
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            try:
                back = unpack(bytes(damaged))
            except UNREADABLE:
                continue
            unnoticed += 1
            assert back.keys() == tensors.keys()
            assert all(torch.equal(back[name], value) for name, value in tensors.items())
            assert read_facts(bytes(damaged)).get("round") == "7"
    assert unnoticed < 8 * 8  # the six letters of "sha256", and white space


def test_other_programs_read_the_file_and_ours_reads_theirs(tmp_path):
    weights = {"w": torch.arange(6.0).reshape(2, 3)}
    (tmp_path / "ours.safetensors").write_bytes(pack(weights, round="3"))
    assert torch.equal(load_file(tmp_path / "ours.safetensors")["w"], weights["w"])
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata()["round"] == "3"
    save_file(weights, tmp_path / "theirs.safetensors")  # without a checksum: taken as it is
    assert torch.equal(read_model(tmp_path / "theirs.safetensors")["w"], weights["w"])


@pytest.fixture
def run(empty_folder):
    command = ["run", "small.toml", "--out", "r", "--quiet", *sets("train.rounds=3")]
    Path("small.toml").write_text("[data]\nclients = 4\n[model]\nname = 'mlp'\nhidden = 6\n[train]\nbatch_size = 64\n")
    assert call(*command) == 0
    return command


def test_a_damaged_model_is_one_line_and_written_again(run, capsys):
    model = Path("r/model.safetensors")
    sound = model.read_bytes()
    weights = read_model(model)
    history = rows("r")
    for place in places(model):
        flip(model, place)
        with pytest.raises(BadInput, match=r"^'r/model.safetensors' is damaged \(") as error:
            read_model(model)
        assert "\n" not in str(error.value)
        capsys.readouterr()
        assert call(*run) == 0
        said = capsys.readouterr().err
        assert said.count("'r/model.safetensors' is damaged (") == 1
        assert "it is written again" in said
        assert model.read_bytes() == sound
    assert all(torch.equal(value, load_file(model)[name]) for name, value in weights.items())
    assert rows("r") == history


def test_a_damaged_best_model_is_named(run, capsys):
    best = Path("r/best.safetensors")
    for place in places(best):
        sound = best.read_bytes()
        flip(best, place)
        with pytest.raises(BadInput, match=r"^'r/best.safetensors' is damaged \("):
            read_model(best)
        capsys.readouterr()
        assert call(*run) == 0
        assert "'r/best.safetensors' is damaged (" in capsys.readouterr().err
        best.write_bytes(sound)
    assert call(*run) == 0
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("where", range(6))
def test_a_damaged_client_state_counts_as_lost(where, tmp_path, caplog):
    """The node says which file, and the protocol for lost state applies: the client starts without state."""
    setup = Setup(tmp_path, "scaffold", participation=1.0, rounds=4)
    damaged = []

    def on_send(grid, node, message):
        if is_train(message, 3) and client_of(node) == 1 and not damaged:
            damaged.extend((tmp_path / "state").glob("*/client-1/state-000002-*"))
            for path in damaged:
                flip(path, places(path)[where])
        return message

    setup.run(setup.grid(on_send))
    assert len(damaged) == 1
    assert_weights(setup, reference(setup, lost={(3, 1)}))
    assert setup.journal[2]["notes"] == [f"client 1 (node {NODE + 1}) has lost its client state and starts again"]
    assert f"'{damaged[0]}' is damaged (" in caplog.text


def test_a_damaged_cached_field_is_sent_again(tmp_path, caplog):
    setup = Setup(tmp_path, lamina.algorithms.create("fedlamb", sync_every=3), participation=1.0, rounds=3)

    def on_send(grid, node, message):
        if is_train(message, 2) and client_of(node) == 1:
            for path in (tmp_path / "state").glob("*/client-1/held-v_hat-*"):
                if "is damaged" not in caplog.text:
                    flip(path, -3)
        return message

    setup.run(setup.grid(on_send))
    assert_weights(setup, reference(setup))
    assert "held-v_hat" in caplog.text
    assert any("all is sent again" in note for note in setup.journal[1]["notes"])
