"""Arrays of the user's own in .npz and .safetensors files, and damaged ones, which are refused in one line."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from data_setup import refusal
from lamina.data import load
from lamina.data.mapped import Mapped


def test_arrays_with_test_data_of_their_own(folder):
    images = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4)
    np.savez("a.npz", x_train=images, y_train=["b", "a", "b"], who_train=[7, 8, 7], x_test=images[:1], y_test=["a"],
             who_test=[8])  # fmt: skip
    train, test = load("arrays", path="a.npz", client="who")
    assert (tuple(train.x.shape), train.x.dtype) == ((3, 1, 4, 4), torch.uint8)
    assert (train.y.tolist(), test.y.tolist(), train.class_names) == ([1, 0, 1], [0], ("a", "b"))
    assert train.columns["who"].tolist() == [7, 8, 7]


def test_arrays_for_testing_need_no_clients(folder):
    x = np.zeros((3, 2))
    np.savez("a.npz", x_train=x, y_train=[0, 1, 0], site_train=["a", "b", "a"], x_test=x, y_test=[0, 0, 1])
    train, test = load("arrays", path="a.npz", client="site")
    assert (train.columns["site"].tolist(), dict(test.columns)) == (["a", "b", "a"], {})
    message = refusal("arrays", path="a.npz", client="sites")
    assert "a.npz (of its arrays, those with _train): there is no array 'sites'; did you mean 'site'?" in message
    assert "(arrays: x, y, site)" in message
    np.savez("b.npz", x=x, y=[0, 1, 0])  # the same without a client, in a file of its own
    np.savez("c.npz", x=x, y=[0, 1, 0], site=[1, 2, 1])
    assert load("arrays", path="c.npz", test="b.npz", client="site").train.columns["site"].tolist() == [1, 2, 1]


def test_safetensors_with_a_held_out_fraction(folder):
    x = np.linspace(0, 1, 20, dtype=np.float64).reshape(10, 2)
    save_file({"inputs": x, "targets": x[:, :1].copy(), "site": np.arange(10) % 3}, "a.safetensors")
    options = {"path": "a.safetensors", "features": "inputs", "label": "targets", "client": "site", "test": 0.3}
    train, test = load("arrays", **options)
    assert (train.x.dtype, train.y.dtype, train.classes, len(train), len(test)) == (
        torch.float32, torch.float32, None, 7, 3,
    )  # fmt: skip
    assert train.columns["site"].shape == (7,)


def test_damaged_arrays(folder):
    np.savez("a.npz", x=np.zeros((6, 2)), y=[0, 1, 0, 1, 0, 1], short=[1, 2])
    assert "no array 'label' (arrays: x, y, short)" in refusal("arrays", path="a.npz", label="label")
    assert "'short' has 2 rows, and 'x' has 6" in refusal("arrays", path="a.npz", client="short")
    whole = (folder / "a.npz").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"no zip"):
        (folder / "b.npz").write_bytes(damaged)
        assert "is not a readable .npz file" in refusal("arrays", path="b.npz")
    np.savez("c.npz", x=np.zeros((0, 2)), y=np.zeros(0, np.int64))
    assert "'x' is empty" in refusal("arrays", path="c.npz")
    np.savez("d.npz", x=np.array([{}, []], dtype=object), y=[0, 1])
    assert "is not a readable .npz file" in refusal("arrays", path="d.npz")  # never unpickled
    np.savez("e.npz", x=np.zeros((1, 2)), y=[5])
    assert "the class '5' appears only in the test data" in refusal("arrays", path="a.npz", test="e.npz")
    np.savez("f.npz", x=np.zeros((1, 3)), y=[1])
    assert "are [2] float64 in the training data and [3] float64" in refusal("arrays", path="a.npz", test="f.npz")
    np.savez("f.npz", x=np.zeros((1, 2), np.uint8), y=[1])  # bytes of images beside floats
    assert "are [2] float64 in the training data and [2] uint8" in refusal("arrays", path="a.npz", test="f.npz")
    (folder / "g.safetensors").write_bytes(b"12345678")
    assert "is not a readable .safetensors file" in refusal("arrays", path="g.safetensors")
    (folder / "h.pt").write_bytes(b"")
    assert "neither a .npz nor a .safetensors" in refusal("arrays", path="h.pt")
    assert "leaves the training or the test data empty" in refusal("arrays", path="a.npz", test=1.5)
    np.savez("i.npz", x=np.array([0.0, 1.0, np.nan, 3.0])[:, None], y=[0, 1, 0, 1])
    nan = "i.npz: sample 2 of 'x' holds a NaN"  # counted in the file, not in the part that trains
    assert nan in refusal("arrays", path="i.npz")
    assert nan in refusal("arrays", path="a.npz", test="i.npz")


def test_arrays_with_several_targets_a_sample(folder):
    x, maps = np.zeros((5, 2), np.float32), np.array([[0, 255, 1]] * 5)
    np.savez(folder / "maps.npz", x=x, y=maps)
    assert load("arrays", path="maps.npz", ignore_index=255).train.y[0].tolist() == [0, -100, 1]
    assert load("arrays", path="maps.npz").train.classes == 256
    numbers = load("arrays", path="maps.npz", task="regression").train
    assert (numbers.classes, numbers.y.dtype, numbers.y[0].tolist()) == (None, torch.float32, [0.0, 255.0, 1.0])
    np.savez(folder / "labels.npz", x=x, y=maps > 0)
    assert load("arrays", path="labels.npz").train.y[0].tolist() == [0, 1, 1]


@pytest.mark.parametrize("kind", ["folder", "safetensors"])
@pytest.mark.parametrize("test", [None, 0.25])
@pytest.mark.parametrize("dtype", ["float64", "uint8", "int32"])
def test_mapped_arrays_are_the_same_samples(folder, kind, test, dtype):
    x, y = (np.arange(8 * 4 * 4) % 251).reshape(8, 4, 4).astype(dtype), np.arange(8) % 2
    arrays = {"x": x, "y": y, "site": np.arange(8)}
    if test is None:
        arrays = {f"{name}_train": values for name, values in arrays.items()} | {"x_test": x[:2], "y_test": y[:2]}
    path = "a.safetensors" if kind == "safetensors" else "a"
    if kind == "safetensors":
        save_file(arrays, folder / path)
    else:
        (folder / path).mkdir()
        for name, values in arrays.items():
            np.save(folder / path / f"{name}.npy", values)
    options = {"path": path} if test is None else {"path": path, "test": test}
    for one, other in zip(load("arrays", **options), load("arrays", **options, mmap=True), strict=True):
        assert isinstance(other.x, Mapped)
        assert (one.x.shape, one.x.dtype) == (other.x.shape, other.x.dtype)
        assert torch.equal(one.x, other.x[:])
        assert torch.equal(one.y, other.y)
        assert {name: values.tolist() for name, values in one.columns.items()} == {
            name: values.tolist() for name, values in other.columns.items()
        }


def test_an_npz_file_cannot_be_mapped(folder):
    np.savez(folder / "a.npz", x=np.zeros((4, 2)), y=np.zeros(4))
    assert "cannot be memory-mapped: save every array in a folder" in refusal("arrays", path="a.npz", mmap=True)
