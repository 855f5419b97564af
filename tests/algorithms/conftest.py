"""Fixtures for algorithms that a test declares."""

import pytest

from lamina.algorithms.declaration import registry


@pytest.fixture
def clean_registry():
    """Remove the algorithms of a test from the registry."""
    before = dict(registry())
    yield
    registry().clear()
    registry().update(before)
