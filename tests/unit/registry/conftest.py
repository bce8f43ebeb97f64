# SPDX-License-Identifier: Apache-2.0
"""Fake distributions: metadata and code in a directory of `sys.path`, as pip would have left them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest


class Site:
    """A directory of installed distributions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(
        self,
        name: str,
        code: str,
        *,
        version: str = "1.0",
        requires: tuple[str, ...] = ("relax-core>=0.1,<0.2",),
        entry: str = "",
        module: str = "",
        files: dict[str, str] | None = None,
        commands: dict[str, str] | None = None,
    ) -> None:
        package = name.replace("-", "_")
        self.write(f"{package}/__init__.py", "")
        self.write(f"{package}/plugin.py", "from relax_core.api import Component, hook\n" + textwrap.dedent(code))
        for file, text in (files or {}).items():
            self.write(f"{package}/{file}", text)
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        info = f"{package}-{version}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\nA text.\n")
        plugin = "" if commands and not code else f"{entry or name} = {module or package + '.plugin'}\n"
        points = "".join(f"{key} = {value}\n" for key, value in (commands or {}).items())
        self.write(f"{info}/entry_points.txt", f"[relax.plugins]\n{plugin}[relax.commands]\n{points}")

    def write(self, file: str, text: str) -> Path:
        path = self.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("RELAX_PLUGINS", "RELAX_DISABLE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    before = set(sys.modules)
    yield Site(path)
    for module in set(sys.modules) - before:
        if module.startswith(("fake", "relax_file_")):
            del sys.modules[module]


REWARD = """
@hook
def relax_rewards():
    return [Component("{name}", "{package}.reward:Half", "Half a point")]
"""

HALF = """
from relax_core.api import Options, Reward

class HalfOptions(Options):
    scale: float = 1.0
    '''How much a half is worth.'''
    strictness: int = 0

class Half(Reward[HalfOptions]):
    def score(self, task, trajectory):
        return 0.5 * self.options.scale
"""


@pytest.fixture
def half(site: Site):
    """Install a distribution with one working reward."""

    def install(dist: str = "fake-half", name: str = "half", **more) -> None:
        package = dist.replace("-", "_")
        files = {"reward.py": HALF, **more.pop("files", {})}
        site.install(dist, REWARD.format(name=name, package=package), files=files, **more)

    return install
