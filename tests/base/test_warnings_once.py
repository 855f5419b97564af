"""Repeated warnings: each text once, and again only after a while, by Python's own handler and by those of the user."""

import logging

import pytest
import torch

import lamina
from lamina.base import warnings_once
from lamina.base.warnings_once import WarningsOnce, print_warnings_once, printing_handlers

log = logging.getLogger("lamina.some.module")


def without_logging(monkeypatch):
    """Be a process whose user has set up no logging; pytest adds its handlers before every test's call."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("lamina"), "handlers", [])
    print_warnings_once()
    print_warnings_once()  # adds no second handler


def test_a_text_that_is_repeated_is_printed_once(capsys, monkeypatch):
    without_logging(monkeypatch)
    for _ in range(100):
        log.warning("the same")
        log.warning("another %d", 3)
    log.info("no warning")
    assert capsys.readouterr().err == "the same\nanother 3\n"


def test_a_text_is_printed_again_after_a_while(capsys, monkeypatch):
    without_logging(monkeypatch)
    clock = [0.0]
    monkeypatch.setattr(warnings_once.time, "monotonic", lambda: clock[0])
    for seconds in (0, 50, 100, 161):  # the second and third follow the one before within a minute
        clock[0] = seconds
        log.warning("the same")
    assert capsys.readouterr().err == "the same\n" * 2


@pytest.mark.parametrize("owner", ["", "lamina"])
def test_other_handlers_print_alone_and_a_repeated_warning_once(owner, capsys, monkeypatch):
    without_logging(monkeypatch)
    assert not printing_handlers()
    logging.getLogger("lamina").handlers.clear()
    early = collect(owner)
    print_warnings_once()  # when lamina is imported
    for _ in range(100):
        log.warning("the same")
        logging.getLogger("of.others").warning("theirs")
    late = collect(owner)
    log.warning("the same")
    log.warning("the same")
    assert late == ["the same"]  # which it has not had yet
    assert early == (["the same"] if owner else ["the same", *["theirs"] * 100])
    assert "the same" not in capsys.readouterr().err


def collect(owner):
    """Return the texts that a new handler of a logger gets, as they come."""
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger(owner).addHandler(handler)
    return texts


def test_simulations_that_warn_alike_warn_once(caplog):
    x = torch.randn(24, 3), torch.arange(24) % 2
    members = [
        lamina.Simulation(lambda: torch.nn.Linear(3, 2), x, lr=lr, clients=2, metrics=["f1"], device="cpu")
        for lr in (0.1, 0.2, 0.3)
    ]
    for member in members:
        member.run(1)
    assert caplog.text.count("metrics are computed on test data, and there are none") == 1


def test_the_python_api_sets_it_up():
    assert lamina.Simulation
    assert any(isinstance(handler, WarningsOnce) for handler in logging.getLogger("lamina").handlers)
