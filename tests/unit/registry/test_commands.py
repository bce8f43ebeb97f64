# SPDX-License-Identifier: Apache-2.0
"""Commands of `relax` by entry points: which of them `--help` lists, which one a name calls, and who is at fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from relax_core.api import ConfigError, PluginError
from relax_core.api.command import COMMANDS, GROUPS, RelaxCommand
from relax_core.cli.main import app
from relax_core.registry import Catalogue, catalogue
from relax_core.registry.commands import Commands
from tests.unit.registry.conftest import Site

GREET = """
import typer

def greet(name: str, loud: bool = False) -> None:
    '''Greet a run.

    More about it.
    '''
    typer.echo(name.upper() if loud else name)

def fail(kind: str) -> None:
    '''Fail.'''
    from relax_core.api import ConfigError
    raise {"config": ConfigError("field", "1", "write 2"), "exit": typer.Exit(5)}.get(kind, KeyError(kind))

verbs = typer.Typer(help="Do one of two things.")
verbs.command("first")(greet)
verbs.command("second")(greet)
single = typer.Typer()
single.command(context_settings={"ignore_unknown_options": True})(greet)
number = 3
"""
ENTRIES = {
    "greet | watch | Greet a run.": "fake_greet.greet:greet",
    "fake-fail | fake-group | Fail.": "fake_greet.greet:fail",
    "fake-both | watch | Do one of two things.": "fake_greet.greet:verbs",
    "fake-single | watch | Greet a run.": "fake_greet.greet:single",
}


@pytest.fixture
def greets(site: Site) -> Callable[..., None]:
    """Install a distribution that has only commands."""

    def install(dist: str = "fake-greet", commands: dict[str, str] = ENTRIES, **more: Any) -> None:
        site.install(dist, "", commands=commands, files={"greet.py": GREET}, **more)

    return install


def relax(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_the_core_s_entry_points_are_its_verbs_with_the_first_lines_of_their_help() -> None:
    core = Commands({}).core
    assert {"train", "status", "plugins", "why"} <= core.keys()
    for name, offered in core.items():
        assert (offered.parser(name).help or "").partition("\n")[0] == offered.command.help, name
        assert offered.command.group in GROUPS


def test_a_command_of_a_plugin_is_listed_without_its_import_and_called_by_its_name(greets: Callable[..., None]) -> None:
    greets()
    shown = relax("--help").stdout
    assert "Greet a run." in shown.partition("Watch runs:")[2].partition("Control a live run:")[0]
    assert shown.rstrip().splitlines()[-2:] == ["Fake group:", "  fake-fail  Fail."]
    assert "fake_greet.greet" not in sys.modules
    assert relax("greet", "quickstart", "--loud").stdout == "QUICKSTART\n"
    assert relax("fake-greet:greet", "quickstart").stdout == "quickstart\n"
    assert "More about it." in relax("greet", "-h").stdout
    assert relax("fake-both", "second", "quickstart").stdout == "quickstart\n"
    assert relax("fake-single", "--quick").stdout == "--quick\n"


def test_names_are_completed_without_an_import(greets: Callable[..., None]) -> None:
    greets()
    command: Any = typer.main.get_command(app)
    context = command.make_context("relax", [], resilient_parsing=True)
    assert [item.value for item in command.shell_complete(context, "gr")] == ["graph", "greet"]
    assert command.resolve_command(context, ["gre"])[1] is None
    assert "fake_greet.greet" not in sys.modules


@pytest.mark.parametrize(
    ("more", "environ", "said"),
    [
        ({}, {"RELAX_DISABLE_PLUGINS": "fake-greet"}, "skipped: switched off: RELAX_DISABLE_PLUGINS names it"),
        ({}, {"RELAX_PLUGINS": "other"}, "skipped: switched off: RELAX_PLUGINS is set and does not name it"),
        ({"requires": ("relax-core>=7,<8",)}, {}, "skipped: it needs relax-core >=7,<8, but 0.1.0 is installed"),
        ({"requires": ("relax-core >>> 3",)}, {}, "skipped: its metadata is damaged"),
    ],
)
def test_a_distribution_that_may_not_load_offers_no_command_and_a_call_says_why(
    greets: Callable[..., None], monkeypatch: pytest.MonkeyPatch, more: Any, environ: dict[str, str], said: str
) -> None:
    greets(**more)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert "greet" not in Commands().by_name and "Greet a run." not in relax("--help").stdout
    with pytest.raises(ConfigError, match=f"fake-greet 1.0 offers it but was {said}"):
        Commands().find("greet")


def test_a_name_of_two_distributions_is_refused_with_both_full_names(greets: Callable[..., None]) -> None:
    for dist in ("fake-a", "fake-b"):
        greets(dist, {"greet | watch | Greet a run.": f"{dist.replace('-', '_')}.greet:greet"})
    error = relax("greet", "quickstart").exception
    assert isinstance(error, ConfigError) and "write relax fake-a:greet or relax fake-b:greet" in str(error)
    assert {"fake-a:greet", "fake-b:greet"} <= Commands({}).by_name.keys()
    assert relax("fake-b:greet", "quickstart").stdout == "quickstart\n"
    assert (
        "note: command 'greet' is also in fake-b 1.0; call this one as relax fake-a:greet"
        in relax("plugins", "list").stdout
    )


def test_a_name_of_the_core_stays_the_core_s(greets: Callable[..., None]) -> None:
    greets(commands={"status | watch | Greet a run.": "fake_greet.greet:greet"})
    assert Commands({}).find("status").record.distribution == "relax-core"
    assert relax("fake-greet:status", "quickstart").stdout == "quickstart\n"
    assert "also in relax-core 0.1.0; call this one as relax fake-greet:status" in relax("plugins", "list").stdout
    result = relax("plugins", "check", "fake-greet", "--json")
    (failed,) = (check for check in json.loads(result.stdout)["checks"] if check["verdict"] == "failed")
    assert (result.exit_code, failed["detail"]) == (3, "relax-core has a command status; rename this one")


@pytest.mark.parametrize(
    ("entry", "target", "said"),
    [
        ("greet", "fake_greet.greet:greet", 'name the entry point "NAME | GROUP | HELP"'),
        ("greet | watch |", "fake_greet.greet:greet", "NAME | GROUP | HELP"),
        ("Greet | watch | Greet a run.", "fake_greet.greet:greet", "NAME | GROUP | HELP"),
        ("greet | my panel | Greet a run.", "fake_greet.greet:greet", "NAME | GROUP | HELP"),
        ("greet | watch | Greet a run.", "fake_greet.greet", "write the target of greet as package.module:name"),
    ],
)
def test_a_damaged_entry_point_is_left_out_and_listed_with_what_to_write(
    greets: Callable[..., None], entry: str, target: str, said: str
) -> None:
    greets(commands={entry: target, "fake-fail | watch | Fail.": "fake_greet.greet:fail"})
    assert "fake-fail" in relax("--help").stdout and "greet" not in Commands({}).by_name
    listed = relax("plugins", "list").stdout
    assert f"note: a command is left out: fake-greet: {COMMANDS}: got" in listed and said in listed


def test_the_second_command_of_one_name_in_a_distribution_is_left_out(greets: Callable[..., None]) -> None:
    greets(commands={**ENTRIES, "greet | watch | Other.": "fake_greet.greet:fail"})
    assert Commands({}).find("greet").command.help == "Greet a run."
    assert "'greet | watch | Other.' has the name of another command" in relax("plugins", "list").stdout


def test_a_fault_of_a_plugin_s_command_is_charged_to_the_plugin(greets: Callable[..., None]) -> None:
    greets(
        commands={
            **ENTRIES,
            "fake-gone | watch | Gone.": "fake_greet.gone:gone",
            "fake-odd | watch | 3.": "fake_greet.greet:number",
        }
    )
    error = relax("fake-fail", "other").exception
    assert isinstance(error, PluginError) and error.component == "command 'fake-fail' of fake-greet 1.0"
    assert "KeyError: 'other'" in str(error) and "in fail" in error.frames and "relax_core" not in error.frames
    assert isinstance(relax("fake-fail", "config").exception, ConfigError)
    assert relax("fake-fail", "exit").exit_code == 5
    assert relax("fake-fail").exit_code == 2
    for name, said in (("fake-gone", "No module named 'fake_greet.gone'"), ("fake-odd", "fake_greet.greet:number: ")):
        error = relax(name).exception
        assert isinstance(error, PluginError) and said in str(error)


def test_a_fault_of_the_core_s_command_stays_the_core_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_core.views.run.open_run", lambda _: {}["gone"])
    assert isinstance(relax("status").exception, KeyError)


def test_an_unknown_name_is_answered_with_the_plugin_to_install_or_a_similar_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "installable", lambda: {"command": {"fake-absent": "relax-plugin-absent"}})
    for name in ("fake-absent", "relax-plugin-absent:fake-absent"):
        with pytest.raises(ConfigError, match="its plugin is not installed; pip install relax-plugin-absent"):
            Commands({}).find(name)
    error = relax("trainn", "quickstart").exception
    assert isinstance(error, ConfigError) and error.exit_code == 2 and "did you mean 'train'" in str(error)


VERBS = {
    "plugins greet | plugins | Greet a run.": "fake_greet.greet:greet",
    "plugins fake-fail | plugins | Fail.": "fake_greet.greet:fail",
    "plugins list | plugins | Greet a run.": "fake_greet.greet:greet",
}


def test_a_verb_that_a_plugin_adds_is_listed_without_its_import_and_called(greets: Callable[..., None]) -> None:
    greets(commands=VERBS)
    listed = relax("plugins", "--help").stdout
    assert [line.split()[0] for line in listed.partition("Commands:")[2].strip().splitlines()][:2] == ["list", "show"]
    assert "  greet      Greet a run." in listed and "Greet a run." not in relax("--help").stdout
    assert "fake_greet.greet" not in sys.modules
    assert relax("plugins", "greet", "quickstart").stdout == "quickstart\n"
    assert "command plugins greet: Greet a run." in relax("plugins", "show", "plugins greet").stdout
    error = relax("plugins", "fake-fail", "other").exception
    assert isinstance(error, PluginError) and error.component == "command 'plugins fake-fail' of fake-greet 1.0"
    assert "fake-greet" in relax("plugins", "list").stdout, "a verb of the core stays the core's"
    assert relax("plugins", "fake-greet:list", "quickstart").stdout == "quickstart\n"


def test_a_verb_of_two_distributions_is_refused_with_both_full_names(greets: Callable[..., None]) -> None:
    for dist in ("fake-a", "fake-b"):
        greets(dist, {"plugins greet | plugins | Greet a run.": f"{dist.replace('-', '_')}.greet:greet"})
    said = str(relax("plugins", "greet", "quickstart").exception)
    assert "write relax plugins fake-a:greet or relax plugins fake-b:greet" in said
    assert relax("plugins", "fake-b:greet", "quickstart").stdout == "quickstart\n"
    assert "call this one as relax plugins fake-a:greet" in relax("plugins", "list").stdout


def test_an_unknown_verb_is_answered_with_the_plugin_to_install_or_a_similar_verb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "installable", lambda: {"command": {"plugins absent": "relax-plugin-absent"}})
    error = relax("plugins", "absent").exception
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert str(error) == "command: got 'plugins absent'; its plugin is not installed; pip install relax-plugin-absent"
    assert "did you mean 'show'" in str(relax("plugins", "shaw").exception)


def test_commands_are_listed_shown_and_checked_as_parts_of_their_plugin(greets: Callable[..., None]) -> None:
    greets(commands={**ENTRIES, "fake-late | watch | Greet.": "fake_greet.greet:greet"})
    document = json.loads(relax("plugins", "list", "--kind", "command", "--json").stdout)
    (plugin,) = (plugin for plugin in document["plugins"] if plugin["distribution"] == "fake-greet")
    assert plugin["state"] == "ok" and len(plugin["commands"]) == len(ENTRIES) + 1
    assert plugin["commands"][-1] == {
        "name": "greet", "group": "watch", "help": "Greet a run.", "target": "fake_greet.greet:greet",
    }  # fmt: skip
    assert "fake-greet" not in {plugin.name for plugin in Catalogue.load().resolved}, "workers need no commands"
    shown = relax("plugins", "show", "greet").stdout
    assert "command greet: Greet a run." in shown and "More about it." in shown
    (failed,) = (
        one
        for one in json.loads(relax("plugins", "check", "fake-greet", "--json").stdout)["checks"]
        if one["verdict"] == "failed"
    )
    assert failed["subject"] == "command fake-late"
    assert failed["detail"] == "its documentation begins 'Greet a run.', its entry point says 'Greet.'"


def test_the_entry_points_of_all_installed_commands_can_be_parsed() -> None:
    assert all(RelaxCommand.parse(entry) for entry in entry_points(group=COMMANDS))


LIGHT = """
import sys
before = set(sys.modules)
sys.argv = ["relax", "--help"]
from relax_core.__main__ import main
try:
    main()
finally:
    roots = {name.partition(".")[0] for name in set(sys.modules) - before}
    print(*sorted(roots - set(sys.stdlib_module_names)), file=sys.stderr)
    print(*sorted(name for name in sys.modules if name.startswith("relax_core.")), file=sys.stderr)
"""


@pytest.mark.process
def test_help_imports_typer_and_a_few_modules_of_the_core_whatever_is_installed() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=600, check=False)
    *_, packages, modules = done.stderr.splitlines()
    assert set(packages.split()) <= {
        "annotated_doc",
        "packaging",
        "lazy_loader",
        "relax_core",
        "shellingham",
        "typer",
        "typing_extensions",
    }, packages
    rooms = {name.split(".")[1] for name in modules.split()}
    assert rooms == {"__main__", "api", "cli", "observe", "registry"} and "relax_core.registry.loader" not in modules
