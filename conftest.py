# SPDX-License-Identifier: Apache-2.0
"""Rules of the whole suite: tests that start Ray share one process, and with `--no-skips` only a missing GPU excuses one.

A test marked `process`, as every test on Ray is, starts processes. It may be repeated once, and the summary lists the repeat as
a defect. Fixtures stand in the `conftest.py` beside the tests that use them, except for the one that all tests have.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes is the machine's matter, and no test's.
settings.register_profile("relax", deadline=None)
settings.load_profile("relax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail when a test that is not marked gpu was skipped")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips(refused=config.getoption("--no-skips")), "skips")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off while modules are imported: it takes a quarter of the time and finds nothing."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose which tests run one after another in one process of `--dist loadgroup`, before xdist reads the groups.

    All tests on Ray do, since they share a cluster; else the tests of a class or file do, since they share fixtures. Tests
    that start processes come first: they take longest, and short ones fill the end evenly.
    """
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
            item.add_marker("process")
        elif not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.parent.nodeid if item.parent else item.nodeid))
        if item.get_closest_marker("process"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: item.get_closest_marker("process") is None)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Keep what is there before a module's tests out of the search for garbage: imported modules and thousands of tests."""
    from relax_core.runners import context

    context.freezes = False
    gc.collect()
    gc.freeze()


class Skips:
    """Counts skips where all reports come together, with or without xdist."""

    def __init__(self, refused: bool) -> None:
        self._refused = refused
        self._for_gpu: list[str] = []
        self._other: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            (self._for_gpu if "gpu" in report.keywords else self._other).append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._other.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._refused and self._other and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for report in terminalreporter.stats.get("rerun", ()):
            terminalreporter.write_line(f"defect: failed once and was repeated: {report.nodeid}", red=True)
            terminalreporter.write_line(report.longreprtext)
        if self._refused or self._for_gpu:
            terminalreporter.write_line(f"skipped for want of a GPU: {len(self._for_gpu)}")
        for nodeid in self._other if self._refused else ():
            terminalreporter.write_line(f"skipped, which only tests marked gpu may be: {nodeid}", red=True)
