"""The folder of a Flower app: what its ``pyproject.toml`` says."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from lamina.base.errors import BadInput
from lamina.base.registry import import_named
from lamina.flower.node import Node


class AppFolder(NamedTuple):
    """A Flower app."""

    name: str
    config: dict[str, Any]  # the run configuration's keys and their defaults
    client: str  # where its client app is: "package.module:name"
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> AppFolder:
        """Return the app in a folder."""
        try:
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
            app = project["tool"]["flwr"]["app"]
            client = app.get("components", {}).get("clientapp", "")
            return cls(project["project"]["name"], app["config"], client, folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(
                f"'{folder}' is not the folder of a Flower app (pyproject.toml with [tool.flwr.app.config]): "
                "`lamina flower new` makes one"
            ) from error

    def node(self) -> Node:
        """Import and return the app of its nodes."""
        sys.path.insert(0, str(self.folder.absolute()))
        node = import_named("client app", self.client)
        if not isinstance(node, Node):
            raise BadInput(f"'{self.client}' is a {type(node).__name__}, not what Federation.client_app() returns")
        return node
