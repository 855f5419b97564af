"""Flower's versions, and its internals: they are as expected in the installed version, and used in one file only."""

import ast
import runpy
import sys
from pathlib import Path

import pytest
from flwr.proto.message_pb2 import Message as FlowerMessage
from flwr.proto.message_pb2 import Metadata as FlowerMetadata
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.superlink.grid import HttpGrid

import lamina
from lamina.flower import mail

PUBLIC = {"flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_one_file_imports_private_modules_of_flower():
    private = {
        path.name
        for path in Path(lamina.__file__).parent.rglob("*.py")
        if any(name.partition(".")[0] == "flwr" and name not in PUBLIC for name in imports(path))
    }
    assert private == {"internals.py"}


@pytest.fixture
def grid():
    """Flower's Grid, whose SuperLink hands out replies to m2 and m1, to a message nobody asked for, and two others."""
    messages = [FlowerMessage(metadata=FlowerMetadata(message_id=f"r{i}", reply_to_message_id=about))
                for i, about in enumerate(("m2", "", "m1", "m9", ""))]  # fmt: skip
    trees = [ObjectTree(object_id=message.metadata.message_id) for message in messages]
    response = PullAppMessagesResponse(messages_list=messages, message_object_trees=trees)
    grid = HttpGrid("127.0.0.1:1", insecure=True, token="unused")  # connects when it is asked for something
    grid._runtime_client.PullMessages = lambda request: response
    yield grid
    grid._disconnect()


def pulled(grid, *wanted):
    response = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=wanted))
    trees = [tree.object_id for tree in response.message_object_trees]
    assert trees == [message.metadata.message_id for message in response.messages_list]
    return [message.metadata.reply_to_message_id for message in response.messages_list]


def test_messages_to_the_server_that_are_no_replies_are_not_waited_for(grid):
    """Flower's SuperLink adds them to any pull, and its Grid would wait for their parts before it returns."""
    assert pulled(grid, "m1", "m2") == ["m2", "", "m1", "m9", ""]
    mail.Puller(grid)
    assert pulled(grid, "m1", "m2") == ["m2", "m1"]
    assert pulled(grid) == []


def test_without_flower_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ImportError, match=r"^lamina\.flower needs Flower: pip install -e '\.\[flower\]'$"):
        runpy.run_path(lamina.flower.__file__)


@pytest.mark.parametrize("version", ["1.40.2", "1.43.0", "1.43.0.dev20261117", "1.4.2", "2.0.0"])
def test_another_version_of_flower_is_refused_in_one_line(monkeypatch, version):
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    with pytest.raises(ImportError, match=rf"^lamina\.flower needs Flower 1\.41 or 1\.42, not {version}: pip install"):
        runpy.run_path(lamina.flower.__file__)


@pytest.mark.parametrize("version", ["1.41.0", "1.42.0", "1.42.1"])
def test_the_supported_versions_of_flower_are_accepted(monkeypatch, version):
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    runpy.run_path(lamina.flower.__file__)
