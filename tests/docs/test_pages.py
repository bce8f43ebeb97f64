# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows is true: generated pages are current, Python runs, TOML composes, commands and links exist."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer.main
from cookiecutter.main import cookiecutter
from relax_plugin_authoring.new_project import bake, template_of
from typer.testing import CliRunner

from relax_core.cli.main import app
from relax_core.config.compose import compose
from relax_core.control.prepare import known_recipes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = {"configuration.md", "metrics.md", "cli.md", "kinds.md", "algorithms.md", "recipes.md"}
WRITTEN = [page for page in PAGES if page.name not in GENERATED]
SNIPPET = re.compile(r"(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)
BASE = {
    "model": {"path": "models/my-model"},
    "data": {"train": "data/train.jsonl"},
    "algorithm": "grpo",
    "engine": "transformers",
    "trainer": "torch",
    "rewards": ["exact"],
}


@dataclass(frozen=True)
class Snippet:
    """One fenced block and the comment before it: `file: NAME`, `not run: WHY`, or nothing."""

    page: Path
    note: str
    language: str
    code: str

    @property
    def file(self) -> str:
        return self.note.removeprefix("file: ") if self.note.startswith("file: ") else ""


def snippets(page: Path, language: str) -> list[Snippet]:
    found = SNIPPET.finditer(page.read_text(encoding="utf-8"))
    made = (Snippet(page, match["note"] or "", match["language"], match["code"]) for match in found)
    return [snippet for snippet in made if snippet.language == language]


def with_language(language: str) -> list[Path]:
    return [page for page in WRITTEN if snippets(page, language)]


def write_files(page: Path, folder: Path) -> None:
    """The files that a page shows, as a reader would save them."""
    for snippet in snippets(page, "python"):
        if snippet.file:
            (folder / snippet.file).write_text(snippet.code)


def test_generated_pages_match_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert set(generate["PAGES"]) == GENERATED
    assert generate["main"](check=True) == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", with_language("python"), ids=lambda page: page.name)
def test_python_runs_in_the_order_of_the_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {"__name__": page.stem}
    write_files(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for snippet in snippets(page, "python"):
        code = compile(snippet.code, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if not snippet.note.startswith("not run: "):
            exec(code, names)


@pytest.mark.parametrize("page", with_language("toml"), ids=lambda page: page.name)
def test_toml_is_a_configuration_with_its_keys_checked(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for snippet in snippets(page, "toml"):
        if not snippet.file:
            (tmp_path / "shown.toml").write_text(snippet.code)
            composed = compose([tmp_path / "shown.toml"], base=BASE, on_disk=False)
            assert composed.config.steps


@cache
def relax() -> Any:
    """Return the command with all verbs; making it takes a tenth of a second."""
    return typer.main.get_command(app)


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in WRITTEN:
        for snippet in snippets(page, "sh"):
            for line in snippet.code.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["relax"]:
                    yield page.name, words[1:]


@pytest.mark.parametrize("page", [page.name for page in WRITTEN])
def test_shown_commands_parse(page: str) -> None:
    for words in (words for of, words in commands() if of == page):
        parse(page, words)


def test_every_help_text_is_a_whole_sentence() -> None:
    def texts(command: Any, path: str) -> Iterator[tuple[str, str]]:
        yield path, command.help or ""
        yield from ((f"{path} {one.name}", getattr(one, "help", None) or "") for one in command.params)
        for name, verb in getattr(command, "commands", {}).items():
            yield from texts(verb, f"{path} {name}")

    found = dict(texts(typer.main.get_command(app), "relax"))
    assert "relax data check media" in found
    assert [path for path, text in found.items() if not re.match(r"(?s)[^a-z\s].*\.$", text)] == []


def test_short_help_works_everywhere_and_the_version_is_printed() -> None:
    for words in ([], ["train"], ["config"], ["config", "show"], ["plugins", "list"]):
        shown = CliRunner().invoke(app, [*words, "-h"])
        assert shown.exit_code == 0 and shown.stdout == CliRunner().invoke(app, [*words, "--help"]).stdout
    assert CliRunner().invoke(app, ["--version"]).stdout == f"relax {metadata.version('relax-core')}\n"


def test_every_command_that_a_text_names_exists() -> None:
    """Error messages, docstrings, templates and pages name a command after a backtick, or after words such as `next:`."""
    roots = [ROOT / name for name in ("relax_core", "relax_contrib", "plugins", "docs", "README.md")]
    paths = [path for root in roots for path in (root.rglob("*") if root.is_dir() else [root])]
    recipes, seen, faults = set(known_recipes()), 0, []
    for path in (path for path in paths if path.suffix in {".py", ".md", ".toml", ".html"}):
        for named in NAMED.findall(path.read_text(encoding="utf-8")):
            seen += 1
            faults += [f"{path.relative_to(ROOT)}: relax {named}: {why}" for why in misnamed(named.split(), recipes)]
    assert not faults and seen > 200


NAMED = re.compile(r"(?:`|(?:: |see |write |and |&& |^|\")(?=relax [a-z]+ ))relax ([a-z][^`\n\"']*)", re.MULTILINE)
"""Pattern of a command in a text."""
FORMS = {"try": {"reward", "agent"}}
"""First words of a command that mean more than a configuration."""


def misnamed(words: list[str], recipes: set[str]) -> Iterator[str]:
    """Yield the words of a command that the parser does not know: verbs, configurations and options."""
    command, name = relax(), ""
    while hasattr(command, "commands"):
        if not words or not re.fullmatch(r"[a-z-]+[,;:.)]*", words[0]):
            return
        name = words.pop(0).rstrip(",;:.)")
        if name not in command.commands:
            yield f"no verb {name}"
            return
        command = command.commands[name]
    takes_files = any(parameter.name in ("files", "arguments") for parameter in command.params)
    if (
        takes_files
        and words
        and re.fullmatch(r"[a-z][a-z-]*", words[0])
        and words[0] not in recipes | FORMS.get(name, set())
    ):
        yield f"no recipe or form {words[0]}"
    known = {"--help", *(option for one in command.params for option in one.opts + one.secondary_opts)}
    for word in words[: words.index("--") if "--" in words else None]:
        option = word.partition("=")[0].rstrip(",;:.)")
        if option.startswith("--") and option not in known:
            yield f"no option {option}"


def test_a_command_that_does_not_exist_is_found() -> None:
    assert [*misnamed(["try", "environment", "my.toml"], set())] == ["no recipe or form environment"]
    assert [*misnamed(["teach", "my.toml"], set())] == ["no verb teach"]
    assert [*misnamed(["train", "quickstart", "--dry", "steps=5"], {"quickstart"})] == ["no option --dry"]
    assert [*misnamed(["try", "agent", "my.toml", "--", "agent", "--fast"], set())] == []


def parse(page: str, words: list[str]) -> None:
    command = relax()
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"{page}: relax has no verb {' '.join(words)}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context("relax", list(words))


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_the_algorithm_that_is_shown_becomes_the_package_that_is_shown(tmp_path: Path) -> None:
    """One file under a hundred lines, and nothing else is edited; `tests/authors` shows that it conforms and trains."""
    page = ROOT / "docs" / "plugins.md"
    write_files(page, tmp_path)
    package = bake("algorithm", "lite-ppo", tmp_path, tmp_path / "lite_ppo.py")
    shown = (tmp_path / "lite_ppo.py").read_text()
    assert (package / "src/relax_plugin_lite_ppo/algorithm.py").read_text() == shown and shown.count("\n") < 100
    (project,) = (one.code for one in snippets(page, "toml") if one.file == "relax-plugin-lite-ppo/pyproject.toml")
    assert project in (package / "pyproject.toml").read_text()
    (plugin,) = (one.code for one in snippets(page, "python") if "relax_plugin_lite_ppo.algorithm" in one.code)
    assert (package / "src/relax_plugin_lite_ppo/plugin.py").read_text().endswith(plugin)


def test_the_template_makes_the_same_project_with_cookiecutters_own_command(tmp_path: Path) -> None:
    page = ROOT / "docs" / "cookiecutter.md"
    (line,) = (
        line for one in snippets(page, "sh") for line in one.code.splitlines() if line.startswith("cookiecutter ")
    )
    given = dict(word.split("=") for word in shlex.split(line)[3:])
    ours = bake(given["kind"], given["name"], tmp_path / "ours")
    (tmp_path / "settings.yaml").write_text(f"replay_dir: {tmp_path}\ncookiecutters_dir: {tmp_path}\n")
    cookiecutter(
        str(template_of(given["kind"])), no_input=True, extra_context=given, output_dir=str(tmp_path / "theirs"),
        config_file=str(tmp_path / "settings.yaml"),
    )  # fmt: skip
    made = [path.relative_to(ours) for path in ours.rglob("*") if path.is_file()]
    theirs = tmp_path / "theirs" / ours.name
    assert {path: (theirs / path).read_text() for path in made} == {path: (ours / path).read_text() for path in made}
    shown = set(re.findall(r"^\| `([\w./]+)` \| (?!the kind|the function|the name)", page.read_text(), re.MULTILINE))
    assert shown <= set(map(str, made)) and len(made) - len(shown) == 2, "all files but __init__.py and .gitignore"


def test_the_pages_have_snippets_to_test() -> None:
    plugins = ROOT / "docs" / "plugins.md"
    assert len(snippets(plugins, "python")) >= 6 and len(snippets(plugins, "toml")) >= 4
    assert {page for page, _ in commands()} >= {"README.md", "quickstart.md", "plugins.md"}


def documented_keys() -> set[str]:
    """Every key by its table, as the generated page has them; those of any algorithm as `algorithm.key`."""
    keys: set[str] = set()
    table = ""
    for line in (ROOT / "docs/configuration.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## (?:`?\[+([\w.]+)\]+`?|Top level)", line):
            table = heading[1] or ""
            keys.add(table)
        elif heading := re.match(r"### `\[+([\w.]+)\]+`", line):
            table = heading[1]
            keys.add(table)
        elif row := re.match(r"\| `(\w+)` \|", line):
            keys.add(f"{table}.{row[1]}".lstrip("."))
    return keys


def test_settings_named_for_other_frameworks_exist() -> None:
    named = []
    for line in (ROOT / "docs/coming-from.md").read_text(encoding="utf-8").splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) == 5 and not cells[1].strip(" -").startswith("there"):
            named += re.findall(r"`([a-z_.]+)`", cells[2])
    assert len(named) > 50
    assert sorted(set(named) - documented_keys()) == []
