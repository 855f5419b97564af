"""Data larger than memory: batches of memory-mapped arrays are read when they are used, and give the same numbers."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.base.errors import BadInput
from lamina.data import mapped
from lamina.data.mapped import Mapped
from small_simulations import take_gpu_path

NOISE = np.random.default_rng(0)
X, Y = NOISE.normal(size=(40, 6)).astype("float32"), NOISE.integers(0, 3, 40)
LARGE = """
import resource, sys
import numpy as np, torch, lamina

# Of this process's own memory; pages of the file are the system's, which takes them back when it needs them.
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
x = np.memmap(sys.argv[1], "float32", "r", shape=(1 << 20, 1024))
simulation = lamina.Simulation(
    torch.nn.Linear(1024, 3), (x, np.arange(1 << 20) % 3), "fedavg", clients=64, participation=0.1, local_steps=50,
    lr=0.01, local_test=0.01,
)
history = simulation.run(2)
print(history[-1]["train_loss"])
"""


def on_disk(folder, array, name="x"):
    """Return the array as a memory-mapped file."""
    np.save(folder / f"{name}.npy", array)
    return np.load(folder / f"{name}.npy", mmap_mode="r")


@pytest.mark.parametrize("algorithm", ["fedlamb", "mime"])  # the second has gradients over all data
@pytest.mark.parametrize("engine", ["loop", "stacked", "captured", "a GPU's path"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_training_gives_the_same_numbers_as_data_in_memory(tmp_path, engine, dtype, algorithm):
    name = "stacked" if engine == "a GPU's path" else engine
    settings = {"clients": 4, "local_test": 0.3, "engine": name, "lr": 0.1, "client_metrics": False, "batch_size": 4}
    x, model = X.astype(dtype), nn.Linear(6, 3)
    histories = []
    for values in (x, on_disk(tmp_path, x)):
        run = lamina.Simulation(model, (values, Y), algorithm, test=(values[:9], Y[:9]), **settings)
        if engine != name:
            take_gpu_path(run)
        assert isinstance(run.train_data.x, torch.Tensor if values is x else Mapped)
        histories.append([{k: v for k, v in row.items() if "seconds" not in k} for row in run.run(3)])
    assert histories[0] == histories[1]


@pytest.mark.parametrize(
    ("values", "model"),
    [
        (NOISE.integers(0, 256, (12, 3, 4, 4)).astype("uint8"), nn.Sequential(nn.Flatten(), nn.Linear(48, 2))),
        (NOISE.integers(0, 256, (12, 4, 4)).astype("uint8"), nn.Sequential(nn.Flatten(), nn.Linear(16, 2))),
        (NOISE.integers(0, 9, (12, 5)).astype("uint16"), nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2))),
        (NOISE.integers(0, 9, (12, 5)).astype("uint8"), nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2))),
        (NOISE.integers(0, 9, (12, 5)).astype(">i4"), nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2))),
    ],
)
def test_images_and_tokens_reach_the_model_as_from_memory(tmp_path, values, model):
    y = np.arange(12) % 2
    losses = []
    for x in (values.astype(values.dtype.newbyteorder("=")), on_disk(tmp_path, values)):
        losses.append(
            lamina.Simulation(model, (x, y), "fedavg", clients=3, lr=0.1, engine="loop").run(1)[0]["train_loss"]
        )
    assert losses[0] == losses[1]


def test_a_token_without_a_row_is_found_on_disk(tmp_path):
    tokens = np.zeros((12, 5), "int32")
    tokens[7, 2] = 9
    with pytest.raises(BadInput, match="gets the id 9 from the train data"):
        lamina.Simulation(
            nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2)), (on_disk(tmp_path, tokens), Y[:12] % 2)
        )


def test_a_nan_on_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "CHUNK_BYTES", 5 * X.shape[1] * 4)
    damaged = X.copy()
    damaged[17, 3] = np.nan
    with pytest.raises(BadInput, match="sample 17 of x holds nan"):
        lamina.Dataset(on_disk(tmp_path, damaged), Y)


@pytest.mark.parametrize("most", [1, 3, 128])
def test_rows_subsets_and_joined_files(tmp_path, monkeypatch, most):
    monkeypatch.setattr(mapped, "BLOCK_BYTES", 64)
    monkeypatch.setattr(mapped, "MOST_BLOCKS", most)
    parts = [Mapped.of("d", "x", on_disk(tmp_path, part, f"x{i}")) for i, part in enumerate((X[:15], X[15:]))]
    whole = Mapped.joined([parts[0], torch.from_numpy(X[15:20]), parts[1].subset(np.arange(5, 25))])
    assert whole.shape == (40, 6)
    rows = torch.from_numpy(NOISE.integers(0, 40, (3, 30)))
    assert torch.equal(whole[rows], torch.from_numpy(X)[rows])
    assert torch.equal(whole[3:33:7], torch.from_numpy(X)[3:33:7])
    assert torch.equal(whole[5], torch.from_numpy(X)[5])
    assert torch.equal(torch.cat(list(whole.chunks())), torch.from_numpy(X))
    few = whole.subset(np.array([39, 2, 2])).subset(np.array([2, 0]))
    assert torch.equal(few[:], torch.from_numpy(X)[[2, 39]])
    assert few[torch.zeros(0, dtype=torch.long)].shape == (0, 6)


def test_a_subset_of_a_data_set_reads_nothing(tmp_path, monkeypatch):
    data = lamina.Dataset(on_disk(tmp_path, X), Y)
    monkeypatch.setattr(Mapped, "_read", None)
    rest, held = data.holdout(0.25)
    assert (len(rest), len(held), isinstance(held.x, Mapped)) == (30, 10, True)


def test_a_run_resumes_on_mapped_data_unless_they_changed(tmp_path):
    def run(x, rounds):
        data = (on_disk(tmp_path, x), Y)
        return lamina.Simulation(model, data, "fedavg", clients=4, lr=0.1, test=data, out=tmp_path / "r").run(rounds)

    model = nn.Linear(6, 3)
    run(X, 1)
    assert len(run(X, 2)) == 2
    with pytest.raises(BadInput, match="contents of the data"):
        run(X + 1, 3)


def test_values_that_no_tensor_holds_are_refused(tmp_path):
    with pytest.raises(BadInput, match="x is memory-mapped with uint64 values"):
        lamina.Dataset(on_disk(tmp_path, X.astype("uint64")), Y)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep to RLIMIT_DATA")
def test_four_gigabytes_train_in_one(tmp_path):
    file = tmp_path / "x"
    with file.open("wb") as opened:
        opened.truncate(4 << 30)  # zeros that take no room on the disk
    ended = subprocess.run([sys.executable, "-c", LARGE, file], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) > 0


def test_joined_parts_keep_their_values_whatever_their_types(tmp_path):
    parts = []
    for name, values in {"a": np.array([[7]], np.uint16), "b": np.array([[70_000]], np.uint32)}.items():
        np.save(tmp_path / f"{name}.npy", values)
        parts.append(Mapped.of("data", "x", np.load(tmp_path / f"{name}.npy", mmap_mode="r")))
    assert Mapped.joined(parts)[:].tolist() == [[7], [70_000]]
    assert Mapped.joined([*parts, torch.tensor([[2**40]])])[:].tolist() == [[7], [70_000], [2**40]]
    halves = Mapped.joined([Mapped([np.zeros((1, 1), np.float16)]), torch.tensor([[1e-9]])])
    assert halves.subset(np.array([1]))[0].tolist() == [pytest.approx(1e-9)]
