"""The store of checkpoints, and runs that resume from Python."""

import errno
import os
import random
from typing import NamedTuple

import pytest
import torch

import lamina
from helpers import without_times
from lamina import BadInput
from lamina.algorithms.contract import Model
from lamina.engines.state import State
from lamina.rounds.ledger import Ledger
from lamina.storage import checkpoint
from lamina.storage.checkpoint import Checkpoints, load_newest, pack, unpack

# --- the store of checkpoints, by itself -------------------------------------------------------------------------


class Client(NamedTuple):
    c: torch.Tensor | None
    steps: torch.Tensor | None = None


def state_of(number, clients, size=50):
    return State(number, Model(torch.arange(size) / (number + 1)), {}, clients, Ledger(10))


@pytest.mark.long
def test_ten_thousand_clients_cost_what_changed(tmp_path, monkeypatch):
    """A cohort of 10 writes 10 records, on average fewer than 20 with those that move; disk use stays bounded."""
    clients, size, cohort = 10_000, 50, 10
    written, write = [], checkpoint.write_file

    def counted(path, data):
        if path.name.startswith("clients"):
            written.append(len(data) - 8 - int.from_bytes(data[:8], "little"))
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_file", counted)
    store, draw = Checkpoints(tmp_path), random.Random(0)
    state = state_of(0, {i: Client(torch.full((size,), float(i))) for i in range(clients)}, size)
    store.save(state)
    record = 4 * size
    assert written == [clients * record]
    for number in range(1, 61):
        changed = {i: Client(torch.full((size,), i + number / 100)) for i in draw.sample(range(clients), cohort)}
        state = state_of(number, {**state.clients, **changed}, size)
        store.save(state)
    assert written[1:] == [cohort * record] * 60  # of 10,000 old records hardly any has died
    few = Checkpoints(tmp_path / "few")  # 40 clients, so that records die fast
    state, written[:] = state_of(0, {i: Client(torch.full((size,), float(i))) for i in range(40)}, size), []
    few.save(state)
    for number in range(1, 200):
        changed = {i: Client(torch.full((size,), i + number / 1000)) for i in draw.sample(range(40), cohort)}
        state = state_of(number, {**state.clients, **changed}, size)
        few.save(state)
        on_disk = sum(path.stat().st_size for path in few.folder.glob("clients-*"))
        assert on_disk < 3.5 * 40 * record  # at most half of it dead, for two checkpoints, and headers
    assert cohort * record < sum(written[1:]) / 199 < 2 * cohort * record
    (loaded,) = load_newest([Checkpoints(few.folder)], [(state_of(0, {}, size), Client(None))], few.rounds())
    assert sorted(loaded[0].clients) == list(range(40))
    assert all(torch.equal(loaded[0].clients[i].c, state.clients[i].c) for i in range(40))


def test_only_the_last_two_checkpoints_are_kept_and_all_they_need(tmp_path):
    store = Checkpoints(tmp_path)
    (tmp_path / "thesis.txt").write_text("years of work")
    clients = {}
    for number in range(1, 6):
        clients = {**clients, number: Client(torch.tensor([float(number)]))}
        store.save(state_of(number, clients))
    assert store.rounds() == [4, 5]
    for number in (4, 5):
        state, _ = Checkpoints(tmp_path).load(number, state_of(0, {}), Client(None))
        assert {i: float(record.c) for i, record in state.clients.items()} == {i: i for i in range(1, number + 1)}
    assert (tmp_path / "thesis.txt").exists()


def test_clients_records_may_lie_elsewhere_than_the_model(tmp_path):
    """ "meta" stands for a GPU that all of them would not fit."""
    store, client = Checkpoints(tmp_path), Client(torch.zeros(50))
    store.save(state_of(1, {3: Client(torch.arange(50.0))}))
    like = state_of(0, {})
    like.server = Model(like.server.x.to("meta"))
    state, _ = store.load(1, like, client, torch.device("cpu"))
    assert state.server.x.is_meta
    assert torch.equal(state.clients[3].c, torch.arange(50.0))
    with_the_model, _ = store.load(1, like, client)
    assert with_the_model.clients[3].c.is_meta


def test_a_failed_save_loses_nothing(tmp_path, monkeypatch):
    """A user of the Python API may free some space and save again."""
    store = Checkpoints(tmp_path)
    records = {i: Client(torch.tensor([float(i)])) for i in range(10)}
    store.save(state_of(1, records))
    records = {**records, **{i: Client(torch.tensor([float(-i)])) for i in range(6)}}  # the others have to move
    write = checkpoint.write_file
    for failing in ("clients", "state", "round"):
        with monkeypatch.context() as patch:

            def full(path, data, failing=failing):
                if path.name.startswith(failing):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                write(path, data)

            patch.setattr(checkpoint, "write_file", full)
            with pytest.raises(BadInput, match="No space left"):
                store.save(state_of(2, records))
    store.save(state_of(2, records))
    state, _ = Checkpoints(tmp_path).load(2, state_of(0, {}), Client(None))
    assert {i: float(r.c) for i, r in state.clients.items()} == {i: float(r.c) for i, r in records.items()}


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.complex128),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0,)])
def test_every_dtype_survives_bit_for_bit(dtype, shape):
    """Bytes drawn at random, so NaNs with a payload and negative zeros too."""
    count = torch.zeros(shape).numel() * torch.zeros(1, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    value = raw.clone().view(dtype).reshape(shape)
    back = unpack(pack({"a/b.c": value, "alias": value}))["a/b.c"]
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw)


def simulation(name="fedlamb", **more):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(80, 5, generator=generator), torch.arange(80) % 4
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))
    return lamina.Simulation(model, data, name, test=data, clients=8, participation=0.5, batch_size=5, **more)


RESUMED = [*((name, "stacked") for name in lamina.registry()), ("scaffold", "loop"), ("mimelamb", "loop")]


@pytest.mark.parametrize(("name", "engine"), RESUMED)
def test_every_algorithm_resumes_from_python(tmp_path, name, engine):
    """Saved after every round and restored: the server, the clients, BatchNorm, the ledger, all bit for bit."""
    options = {"sync_every": 3} if "sync_every" in lamina.algorithms.options(lamina.algorithms.find(name)) else {}
    algorithm = lamina.create(name, **options)
    whole = simulation(algorithm, engine=engine)
    whole.run(5)
    first = simulation(algorithm, engine=engine)
    for _ in range(2):
        first.run(1)
        first.save(tmp_path)
    second = simulation(algorithm, engine=engine)
    second.restore(tmp_path)
    second.run(3)
    assert without_times(second.history) == without_times(whole.history)
    kept = [i for i, record in whole.state.clients.items() if any(value is not None for value in record)]
    pairs = [(whole.state.clients[i], second.state.clients[i]) for i in kept]
    for a, b in [(whole.state.server, second.state.server), *pairs]:
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(value, second.state.buffers[n]) for n, value in whole.state.buffers.items())
    second.save(tmp_path)  # and may be saved there again


@pytest.mark.parametrize(("engine", "home"), [("stacked", "cpu"), ("loop", None)])
def test_restore_leaves_the_clients_records_where_the_engine_wants_them(tmp_path, monkeypatch, engine, home):
    """Of ten thousand clients, they might not fit the GPU that the model is on."""
    first = simulation(engine=engine)
    first.run(1)
    first.save(tmp_path)
    seen, old = [], checkpoint.load_newest

    def look(*arguments, home=None):
        seen.append(home and home.type)
        return old(*arguments, home=home)

    monkeypatch.setattr(checkpoint, "load_newest", look)
    simulation(engine=engine).restore(tmp_path)
    assert seen == [home]


def test_restore_refuses_what_is_not_there_or_does_not_fit(tmp_path, caplog):
    with pytest.raises(BadInput, match="no checkpoint of this simulation"):
        simulation().restore(tmp_path / "none")
    other = simulation("scaffold")
    other.run(1)
    other.save(tmp_path / "scaffold")
    with pytest.raises(BadInput, match=r'is of another run: algorithm.name = "scaffold" \(now "fedlamb"\), lr'):
        simulation("fedlamb").restore(tmp_path / "scaffold")
    assert "damaged" not in caplog.text
