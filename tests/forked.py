# SPDX-License-Identifier: Apache-2.0
"""Processes that share the tests: `pytest -n 3` forks three after the collection.

pytest-xdist starts an interpreter for each process, which imports and collects all tests again: half a minute of processor
time. A forked process has the modules and the tests already.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

GROUP = "one_process"
"""Marker of tests that run one after another in one process; its argument names the group."""


@dataclass
class Worker:
    """A process that runs tests, as its parent sees the process."""

    process: BaseProcess
    connection: Connection
    assigned: deque[int] = field(default_factory=deque)
    """Positions in the session of tests that have not finished, in the order in which they run."""


class Forked:
    """Runs groups of tests in `count` processes, in the order of the session.

    A group is never divided: the tests of one `one_process` marker, else of one class or file, which share fixtures.
    A process asks for a group when it starts the last test of the group before. If a process dies, the test that was running
    fails, and another process runs the rest of the group.
    """

    def __init__(self, count: int) -> None:
        self._count, self._started = count, 0
        self._waiting: deque[list[int]] = deque()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop raises or returns at once
        self._waiting.extend(groups(session.items))
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        session.config.pluginmanager.getplugin(
            "capturemanager"
        ).read_global_capture()  # else each process writes this again
        workers = list[Worker]()
        try:
            for _ in range(self._count):
                self._start(session, workers)
            while workers:
                for connection in wait([worker.connection for worker in workers]):
                    (worker,) = (worker for worker in workers if worker.connection is connection)
                    try:
                        self._answer(session, worker, worker.connection.recv())
                    except EOFError:
                        workers.remove(worker)
                        worker.process.join()
                        if worker.assigned:
                            self._report_death(session, worker)
                            self._start(session, workers)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
        finally:
            for worker in workers:
                worker.process.terminate()
                worker.process.join()
        return True

    def _start(self, session: pytest.Session, workers: list[Worker]) -> None:
        ours, theirs = multiprocessing.Pipe()
        inherited = [ours, *(worker.connection for worker in workers)]
        context = multiprocessing.get_context("fork")
        process = context.Process(target=work, args=(session, theirs, inherited, self._started))
        process.start()
        theirs.close()
        workers.append(Worker(process, ours))
        self._started += 1

    def _answer(self, session: pytest.Session, worker: Worker, message: list[tuple[str, Any]] | None) -> None:
        """Send a group if the message asks for one; else hand on what the message says of a finished test."""
        hook = session.config.hook
        if message is None:
            group = self._waiting.popleft() if self._waiting else []
            worker.assigned.extend(group)
            worker.connection.send(group)
            return
        for kind, told in message:
            if kind == "report":
                report = hook.pytest_report_from_serializable(config=session.config, data=told)
                hook.pytest_runtest_logreport(report=report)
            else:
                message_text, category, filename, line, when, nodeid, location = told
                warning = warnings.WarningMessage(message_text, category, filename, line)
                hook.pytest_warning_recorded.call_historic(
                    kwargs={"warning_message": warning, "when": when, "nodeid": nodeid, "location": location}
                )
        item = session.items[worker.assigned.popleft()]
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _report_death(self, session: pytest.Session, worker: Worker) -> None:
        item = session.items[worker.assigned.popleft()]
        if worker.assigned:
            self._waiting.appendleft([*worker.assigned])
        died = f"the process of this test ended with {worker.process.exitcode}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", died, "call")
        session.config.hook.pytest_runtest_logreport(report=report)


def groups(items: list[pytest.Item]) -> list[list[int]]:
    """Return positions of tests by group; the first test of a group decides the group's place."""
    positions: dict[str, list[int]] = {}
    for position, item in enumerate(items):
        marker = item.get_closest_marker(GROUP)
        name = f"marker {marker.args[0]}" if marker else item.parent.nodeid if item.parent else item.nodeid
        positions.setdefault(name, []).append(position)
    return [*positions.values()]


def work(session: pytest.Session, connection: Connection, inherited: list[Connection], number: int) -> None:
    """Run groups of tests in this forked process until the parent sends an empty one."""
    config, told = session.config, Told(session.config)
    for parents in inherited:  # else no process would notice that the parent has ended
        parents.close()
    atexit._clear()  # the functions registered so far are the parent's
    os.environ["RELAX_TEST_PROCESS"] = str(number)
    capturing = config.pluginmanager.getplugin("capturemanager")
    capturing.stop_global_capturing()  # its files are the parent's
    capturing.start_global_capturing()
    capturing.suspend_global_capture()
    reporter = config.pluginmanager.getplugin("terminalreporter")
    config.hook.pytest_runtest_logreport._remove_plugin(reporter)  # the parent prints
    reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 - until the end
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"process-{number}"
    factory._basetemp.mkdir(0o700)
    config.pluginmanager.register(told)

    def items() -> Iterator[pytest.Item | None]:
        connection.send(None)
        while group := connection.recv():
            yield from (session.items[position] for position in group)
            connection.send(None)
        yield None

    for item, following in itertools.pairwise(items()):
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        connection.send(told.messages)
        told.messages.clear()
    atexit._run_exitfuncs()


class Told:
    """Collects reports and warnings of one test for the parent."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.messages: list[tuple[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.messages.append(("report", told))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        told = warning_message
        where = (told.filename, told.lineno, when, nodeid, location)
        self.messages.append(("warning", (str(told.message), told.category, *where)))
