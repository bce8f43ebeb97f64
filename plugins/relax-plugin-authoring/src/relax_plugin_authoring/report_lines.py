# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that prints the result of each test as one line of JSON, while the other tests still run.

`relax plugins check` loads the plugin and reads the lines: `file` is the test file without its ending, `name` the test
(empty while a file is being read). A line without `verdict` says that the test has begun.
"""

from __future__ import annotations

import json

import pytest

from relax_plugin_authoring.check import REPORT_PREFIX


class ReportLines:
    """The plugin of one session."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._verdict, self._detail = "passed", ""

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._verdict, self._detail = "passed", ""
        self._line(nodeid, location[2].rpartition(".")[2])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._verdict != "failed":
            self._verdict, self._detail = report.outcome, _detail(report)
        if report.when == "teardown":
            self._line(report.nodeid, report.location[2].rpartition(".")[2], self._verdict, self._detail)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._line(report.nodeid, "", report.outcome, _detail(report))

    def _line(self, nodeid: str, name: str, verdict: str = "", detail: str = "") -> None:
        file = nodeid.partition("::")[0].removesuffix(".py")
        line = {"file": file, "name": name, **({"verdict": verdict, "detail": detail} if verdict else {})}
        self._config.get_terminal_writer().line(f"\n{REPORT_PREFIX}{json.dumps(line)}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ReportLines(config))


def _detail(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skip, the message of a failed assertion, or the end of the text of another failure."""
    text = report.longrepr
    if isinstance(text, tuple):
        return str(text[2]).removeprefix("Skipped: ")
    crash = getattr(text, "reprcrash", None)
    return crash.message if crash and crash.message else str(text).strip()[-1500:]
