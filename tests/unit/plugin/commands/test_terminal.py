"""Tables and bars are for terminals; a pipe gets whole values, and a payload never gets the cursor."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from celery_selfheal.plugin.commands import terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "60")
    return screen


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_rich", lambda module: None)


def rows(count: int = 1) -> Iterator[tuple[object, ...]]:
    return ((f"a{n}", "[bold]x[/bold]\x1b[31m\n") for n in range(count))


def test_a_table_on_a_terminal_shows_payloads_as_they_are(screen: Terminal) -> None:
    assert terminal.print_table(["id", "text"], rows()) == 1

    assert "[bold]x[/bold]\\x1b[31m\\n" in screen.getvalue()
    assert "\x1b[31m" not in screen.getvalue()


@pytest.mark.usefixtures("no_rich")
def test_without_rich_a_terminal_gets_plain_lines(screen: Terminal) -> None:
    terminal.print_table(["id", "text"], rows())

    assert screen.getvalue() == "id  text\na0  [bold]x[/bold]\\x1b[31m\\n\n"


def test_long_tables_are_printed_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.print_table(["id", "text"], rows(250)) == 250

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 251
    assert lines[0].split() == ["id", "text"]


def test_no_rows_are_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.print_table(["id"], []) == 0

    assert capsys.readouterr().out == ""


def test_a_bar_is_shown_on_a_terminal_only(screen: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal.progress_bar("replay", total=10) as move:
        move(5)
    assert "replay" in screen.getvalue()

    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with terminal.progress_bar("replay", total=10) as move:
        move(5)
    assert pipe.getvalue() == ""


def test_audit_lines_go_to_a_logging_that_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("celery_selfheal.dlq")
    monkeypatch.setattr(logger, "hasHandlers", lambda: True)

    terminal.show_audit_lines()

    assert logger.handlers == []
