# SPDX-License-Identifier: Apache-2.0
"""Rules of the whole suite: tests that start Ray share one process, and with `--no-skips` only a missing GPU excuses one.

Fixtures do not belong here, but the one that all tests have; they stand in the `conftest.py` beside the tests that use them.
"""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

# How long an example takes is the machine's matter, and no test's.
settings.register_profile("relax", deadline=None)
settings.load_profile("relax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail when a test that is not marked gpu was skipped")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips(refused=config.getoption("--no-skips")), "skips")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One Ray cluster at a time: with `--dist loadgroup` these run one after another in one process. Before xdist looks."""
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))


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
        if self._refused or self._for_gpu:
            terminalreporter.write_line(f"skipped for want of a GPU: {len(self._for_gpu)}")
        for nodeid in self._other if self._refused else ():
            terminalreporter.write_line(f"skipped, which only tests marked gpu may be: {nodeid}", red=True)
