from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import docutils.core
import docutils.nodes
import docutils.utils
import pytest
from celery import Celery
from celery.utils.dispatch import Signal

import celery_selfheal
from celery_selfheal import SelfHealTask, signals
from celery_selfheal.settings import SelfHealSettings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.rst"), *ROOT.glob("docs/*.rst")])
README = ROOT / "README.rst"


@pytest.fixture
def current_app() -> Iterator[None]:
    """Else the example's application would stay the current one for all tests that follow."""
    before = celery.current_app._get_current_object()
    yield
    before.set_current()


def parse(page: Path) -> docutils.nodes.document:
    settings: dict[str, Any] = {
        "halt_level": docutils.utils.Reporter.WARNING_LEVEL,
        "report_level": docutils.utils.Reporter.SEVERE_LEVEL,
    }
    return docutils.core.publish_doctree(page.read_text(), source_path=str(page), settings_overrides=settings)


def texts(nodes: Any) -> list[str]:
    return [node.astext() for node in nodes]


def table(name: str) -> list[list[str]]:
    """Cells of the README's table of this name, without its head."""
    found = next(node for node in parse(README).findall(docutils.nodes.table) if name in node["names"])
    rows = next(found.findall(docutils.nodes.tbody)).findall(docutils.nodes.row)
    return [texts(row.findall(docutils.nodes.entry)) for row in rows]


def example() -> str:
    blocks = parse(README).findall(docutils.nodes.literal_block)
    return next(block.astext() for block in blocks if "python" in block["classes"])


def package_reads(setting: str) -> bool:
    """Whether any module but the settings' own asks for the setting, itself or what follows from it."""
    package = Path(inspect.getfile(celery_selfheal)).parent
    sources = [path.read_text() for path in package.rglob("*.py") if path.name != "settings.py"]
    return any(re.search(rf"settings\.{setting}(_for)?\b", source) for source in sources)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_is_valid_and_its_links_lead_somewhere(page: Path) -> None:
    targets = [node["refuri"] for node in parse(page).findall(docutils.nodes.reference) if "refuri" in node]
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]

    assert [target for target in local if not (page.parent / target.partition("#")[0]).exists()] == []


def test_table_has_the_default_of_every_setting_it_names() -> None:
    defaults = {name: default for name, default, _ in SelfHealSettings.describe()}

    in_readme = {name: default for name, default, _ in table("settings")}

    assert in_readme == {name: defaults.get(name, "no such setting") for name in in_readme}


def test_table_names_the_settings_that_this_release_acts_on_and_no_others() -> None:
    names = [name.removeprefix("selfheal_") for name, _, _ in SelfHealSettings.describe()]

    in_readme = [name for name, _, _ in table("settings")]

    assert in_readme == [f"selfheal_{name}" for name in names if package_reads(name)]


def test_table_names_every_signal() -> None:
    in_package = [name for name, value in vars(signals).items() if isinstance(value, Signal)]

    assert sorted(name for name, _ in table("signals")) == sorted(in_package)


@pytest.mark.usefixtures("current_app")
def test_example_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "shop"}

    exec(compile(example(), str(README), "exec"), names)
    app: Celery = names["app"]
    charge: Any = names["charge"]
    result = charge.apply(args=(7, 1250))

    assert result.get() == 1250
    assert "order 7: 1250 cents" in capsys.readouterr().out
    assert isinstance(charge, SelfHealTask)
    assert "celery_selfheal.reap" in app.tasks
    assert {entry["task"] for entry in app.conf.beat_schedule.values()} == {"celery_selfheal.reap"}


@pytest.mark.parametrize("command", ["pip install tox", "tox -e demo", "tox"])
def test_continuous_integration_types_what_the_readme_says(command: str) -> None:
    commands = next(parse(README).findall(docutils.nodes.literal_block)).astext()
    script = (ROOT / ".ci/run").read_text()

    assert command in re.split(r" && |\n", commands)
    assert re.search(rf"^{command}( |$)", script.replace(" --quiet", ""), re.MULTILINE)
