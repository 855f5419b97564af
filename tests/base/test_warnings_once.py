"""Warnings without any logging set up: each text once, and again only after a while; silent beside other handlers."""

import logging

from lamina.base import warnings_once
from lamina.base.warnings_once import WarningsOnce, has_handler, print_warnings_once

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


def test_another_handler_gets_every_warning_and_prints_alone(capsys, monkeypatch):
    without_logging(monkeypatch)
    assert not has_handler()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    assert has_handler()
    log.warning("the same")
    log.warning("the same")
    assert (lines, capsys.readouterr().err) == (["the same"] * 2, "")


def test_the_python_api_sets_it_up():
    import lamina

    assert lamina.Simulation
    assert any(isinstance(handler, WarningsOnce) for handler in logging.getLogger("lamina").handlers)
