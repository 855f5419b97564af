"""What a node keeps on its disk between two messages."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flower_setup import (
    NODE,
    Setup,
    nodes,
    put,
    spoiled,
    with_delta,
)
from lamina.base.errors import BadInput
from lamina.flower.store import Store


class State(NamedTuple):
    """A client's state, with a field that is not used."""

    c: Tensor | None
    unused: Tensor | None


def test_nodes_keep_only_the_states_the_server_may_ask_for(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=4, participation=1.0)
    setup.run()
    for client in range(4):
        kept = sorted(path.name.split("-")[1] for path in (tmp_path / "state").glob(f"*/client-{client}/state-*"))
        assert kept == ["000002", "000003", "000004"]


def test_a_node_that_is_always_refused_keeps_no_more_states_than_others(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=4, participation=1.0)
    spoil = with_delta(lambda delta: put(delta, float("nan")))
    setup.run(setup.grid(on_reply=spoiled(spoil, [2, 3, 4])))
    kept = sorted(path.name.split("-")[1] for path in (tmp_path / "state").glob("*/client-1/state-*"))
    assert kept == ["000001", "000004"]  # the state the server resumes from, and the last that it may name


def test_a_nodes_state_is_for_its_owner_alone(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=1, participation=1.0)
    setup.run()
    folders = [tmp_path / "state", *(path for path in (tmp_path / "state").rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_a_nodes_state_folder_comes_from_its_own_configuration(tmp_path):
    setup = Setup(tmp_path, "scaffold", rounds=2, participation=1.0)
    configs = {node: {**config, "state-dir": str(tmp_path / f"disk{node}")} for node, config in nodes().items()}
    setup.run(setup.grid(configs=configs))
    assert not (tmp_path / "state").exists()
    assert len(list((tmp_path / f"disk{NODE}").rglob("state-*.safetensors"))) == 2


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "state", "0123abcd", 2)


LIKE = State(torch.zeros(3), None)


def test_a_state_is_found_by_the_exchange_that_made_it(store):
    assert store.load_state("aaaaaaaa", LIKE) is None
    store.save_state(1, "aaaaaaaa", State(torch.tensor([1.0, 2.0, 3.0]), None))
    store.save_state(2, "bbbbbbbb", State(torch.tensor([4.0, 5.0, 6.0]), None))
    assert store.load_state("aaaaaaaa", LIKE).c.tolist() == [1.0, 2.0, 3.0]
    store.forget_all_but(["bbbbbbbb"])
    assert store.load_state("aaaaaaaa", LIKE) is None
    assert store.load_state("bbbbbbbb", LIKE).c.tolist() == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("like", [State(torch.zeros(4), None), State(torch.zeros(3).double(), None), State(None, None)])
def test_a_state_of_another_model_is_not_used(store, like):
    store.save_state(1, "aaaaaaaa", LIKE)
    assert store.load_state("aaaaaaaa", like) is None


def test_a_damaged_file_counts_as_lost(store, caplog):
    store.save_state(1, "aaaaaaaa", LIKE)
    store.save_held("v", "0" * 8, torch.ones(3))
    for path in store.folder.iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert store.load_state("aaaaaaaa", LIKE) is None
    assert store.load_held("v", "0" * 8) is None
    assert caplog.text.count("is damaged") == 2


def test_only_the_newest_version_of_a_field_is_kept(store):
    store.save_held("v", "0" * 8, torch.ones(3))
    store.save_held("v_hat", "0" * 8, torch.ones(3))
    store.save_held("v", "1" * 8, 2 * torch.ones(3))
    assert store.load_held("v", "0" * 8) is None
    assert store.load_held("v", "1" * 8).tolist() == [2.0, 2.0, 2.0]
    assert store.load_held("v_hat", "0" * 8).tolist() == [1.0, 1.0, 1.0]


def test_a_task_number_is_taken_once(store):
    store.refuse_replay(5)
    store.refuse_replay(7)
    for number in (7, 6, 5):
        with pytest.raises(BadInput, match="refused a task that is older"):
            store.refuse_replay(number)
    Store(store.folder.parent.parent, "4567cdef", 2).refuse_replay(1)  # another run counts for itself
