# SPDX-License-Identifier: Apache-2.0
"""Rules of the whole suite: tests that start Ray share one process, and with `--no-skips` a skipped test fails the suite.

A test marked `gpu` is left out on a machine without a GPU, and one marked `gpu(2)` on a machine with fewer than two; the
summary counts these tests. A test marked `process`, as every test on Ray is, starts processes. It may be repeated once,
and the summary lists the repeat as a defect. Fixtures stand in the `conftest.py` beside the tests that use them, except
for the one that all tests have.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.forked import GROUP, Forked

# The time of an example depends on the machine, so there is no deadline. The suite tries the same examples in every run;
# `tox -e faults` searches with the profile `search`, whose examples differ by seed.
settings.register_profile("relax", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("relax")
collect_ignore_glob = ["plugins/*/templates/*"]
FOLDERS = itertools.count()
"""Numbers of the folders of this process's tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("relax")
    group._addoption(
        "-n", dest="processes", type=int, default=0, help="number of processes; 0 runs all tests in this one"
    )
    group.addoption("--no-skips", action="store_true", help="fail when a test was skipped")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips(refused=config.getoption("--no-skips")), "skips")
    if processes := config.getoption("processes"):
        config.pluginmanager.register(Forked(processes))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off while modules are imported: it takes a quarter of the time and finds nothing."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need more GPUs than this process sees, and put the others in order.

    All tests on Ray run in one process, since they share a cluster. Tests that start processes come first: they take
    longest, and short ones fill the end evenly.
    """
    if wanting := [item for item in items if lacks_gpus(item)]:
        config.hook.pytest_deselected(items=wanting)
        config.pluginmanager.get_plugin("skips").wanting_gpus = len(wanting)  # type: ignore[union-attr]
        items[:] = [item for item in items if item not in wanting]
    starting, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "ray" in marks:
            item.add_marker(getattr(pytest.mark, GROUP)("ray"))
            item.add_marker("process")
            marks.add("process")
        if "process" in marks:
            item.add_marker(pytest.mark.flaky(reruns=1))
        (starting if "process" in marks else others).append(item)
    items[:] = starting + others


def lacks_gpus(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return False
    from relax_core.runners.local.workers import visible_gpus

    return len(visible_gpus(os.environ)) < (marker.args or (1,))[0]


@pytest.fixture(scope="module", autouse=True)
def apart() -> Iterator[None]:
    """Keep a module's tests apart from what earlier modules of this process left: objects and settings.

    Imported modules and thousands of tests stay out of the search for garbage.
    """
    from relax_core.runners import context

    context.freezes = False
    gc.collect()
    gc.freeze()
    yield
    os.environ.pop("RELAX_TRACEBACKS", None)  # the inline runner sets it for the rest of its process
    if "torch" in sys.modules:  # a deterministic engine or trainer asked for it
        sys.modules["torch"].use_deterministic_algorithms(False)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty folder. pytest's own fixture searches the folders of all earlier tests for a free number."""
    name = re.sub(r"\W", "_", request.node.name)[:26]
    return tmp_path_factory.mktemp(f"{name}-{next(FOLDERS)}", numbered=False)


class Skips:
    """Counts skips, and tests that were left out, where all reports come together."""

    def __init__(self, refused: bool) -> None:
        self._refused = refused
        self._skipped: list[str] = []
        self.wanting_gpus = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._refused and self._skipped and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for report in terminalreporter.stats.get("rerun", ()):
            terminalreporter.write_line(f"defect: failed once and was repeated: {report.nodeid}", red=True)
            terminalreporter.write_line(report.longreprtext)
        if self.wanting_gpus:
            terminalreporter.write_line(f"left out for want of GPUs: {self.wanting_gpus}")
        for nodeid in self._skipped if self._refused else ():
            terminalreporter.write_line(f"skipped: {nodeid}", red=True)
