"""Tables and bars are for terminals; a pipe gets whole values, and a payload never gets the cursor."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout

import pytest

from celery_selfheal.plugin.commands import terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_rich", lambda module: None)


def rows(count: int = 1) -> Iterator[tuple[object, ...]]:
    return ((f"a{n}", "[bold]x[/bold]\x1b[31m\n") for n in range(count))


def test_a_table_on_a_terminal_shows_payloads_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")

    with redirect_stdout(Terminal()) as screen:
        assert terminal.print_table(["id", "text"], rows()) == 1

    assert "[bold]x[/bold]\\x1b[31m\\n" in screen.getvalue()
    assert "\x1b[31m" not in screen.getvalue()


@pytest.mark.usefixtures("no_rich")
def test_without_rich_a_terminal_gets_plain_lines() -> None:
    with redirect_stdout(Terminal()) as screen:
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


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_is_shown_on_a_terminal_only(stream: type[io.StringIO], shown: bool) -> None:
    with redirect_stderr(stream()) as screen, terminal.progress_bar("replay", total=10) as move:
        move(5)

    assert ("replay" in screen.getvalue()) is shown


def test_audit_lines_go_to_a_logging_that_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("celery_selfheal.dlq")
    monkeypatch.setattr(logger, "hasHandlers", lambda: True)

    terminal.show_audit_lines()

    assert logger.handlers == []
