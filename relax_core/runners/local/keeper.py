# SPDX-License-Identifier: Apache-2.0
"""The keeper of a worker that runs authors' code: it ends all processes that the worker started when the worker ends.

Where the kernel allows it, the worker lives in namespaces of its own. It sees only the processes that it started, so it
can't signal other processes or change their limits, priority or processors, and it sees most files read-only
(`mounts.py`). The keeper is process 1 of the namespace, and the kernel ends the namespace with it:

    outer process, started by the parent -> keeper -> worker -> processes that the worker starts

Root may make such namespaces if it has the capability CAP_SYS_ADMIN; other users need user namespaces. Otherwise the
outer process is the keeper. As a child subreaper it becomes the parent of orphans, also in new sessions, and kills them.
Other processes of the user then stay visible to the worker.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from relax_core.runners.local.mounts import check, enter_mounts, libc

NEW_USER, NEW_PROCESSES = 0x10000000, 0x20000000
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that the keeper ignores: a scheduler or terminal may send them to a whole job, but the parent ends the keeper."""
REAP_MS = 1000
"""Milliseconds between two passes that reap orphans."""
WORKS = b"works"


def fork_kept(channel: int, scratch: str, writable: Sequence[str], closed: Sequence[str], hidden: Sequence[str]) -> str:
    """Fork the worker and return in the worker alone; return why it has no namespaces, empty if it has them.

    The calling process becomes the outer process. It ends as the worker ends, after all other processes of the worker,
    or when standard input closes, and deletes the folder `scratch`. `channel`: a descriptor that only the worker keeps.
    In its mount namespace, the worker can change only the folders `writable` without `closed`, and sees no `hidden`
    (`enter_mounts`). Call this while there is one thread. All these processes ignore the signals IGNORED.
    """
    refusal = namespace_refusal()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if not refusal:
        _enter_processes()
        reads, writes = os.pipe()
        first = os.fork()
        if first:
            os.close(channel)
            os.close(writes)
            _, status = os.waitpid(first, 0)
            sent = os.read(reads, 16)  # empty if the keeper was killed
            _end(int(sent) if sent else status, scratch)
        libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        enter_mounts(writable, closed, hidden)
    else:
        libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    worker = os.fork()
    if worker:
        os.close(channel)
        of_worker = _watch(worker)
        if refusal:
            _end(_end_children(worker, of_worker), scratch)
        if of_worker is None:
            os.kill(worker, signal.SIGKILL)
            _, of_worker = os.waitpid(worker, 0)
        os.write(writes, str(of_worker).encode())  # the kernel ends the other processes of the namespace with this one
        os._exit(0)
    if not refusal:
        os.close(reads)
        os.close(writes)
        os.setsid()  # its former process group has processes outside of the namespace
    return refusal


def namespace_refusal() -> str:
    """Return the kernel's refusal of a process namespace with its own read-only mounts; empty if it allows them.

    Tried in a child process, since a process can't leave the namespaces that it has entered.
    """
    reads, writes = os.pipe()
    probe = os.fork()
    if not probe:
        try:
            _enter_processes()
            if not os.fork():
                enter_mounts(("/dev",))  # any folder, so that all system calls are tried
                os.write(writes, WORKS)
                os._exit(0)
            os.wait()
        except OSError as error:
            os.write(writes, str(error.strerror).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(probe, 0)
    answer = os.read(reads, 1024)
    os.close(reads)
    return "" if answer == WORKS else answer.decode() or "the kernel ended the process that tried"


def _enter_processes() -> None:
    """Enter a new namespace of processes for later children. Raises OSError.

    Root does without a user namespace, in which it would lose its rights to files of other users.
    """
    user, group = os.geteuid(), os.getegid()
    check("unshare", libc.unshare(NEW_PROCESSES | (NEW_USER if user else 0)))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _watch(worker: int) -> int | None:
    """Reap orphans until the worker ends, and return its wait status; return None if standard input closes first."""
    poll = select.poll()
    poll.register(0, 0)  # reports only that all write ends have closed
    poll.register(os.pidfd_open(worker), select.POLLIN)
    while not any(descriptor == 0 for descriptor, _ in poll.poll(REAP_MS)):
        ended = -1
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == worker:
                return status
    return None


def _end_children(worker: int, status: int | None) -> int:
    """Kill child processes until none is left; children of a killed process become children of this process."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for entry in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    stat = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                    if int(stat[1]) == os.getpid():
                        os.kill(int(entry), signal.SIGKILL)
            ended, of_ended = os.waitpid(-1, 0)
            status = of_ended if ended == worker else status
    return status or 0


def _end(status: int, scratch: str) -> NoReturn:
    """Delete the scratch folder and end this process with a wait status: by the same signal or with the same exit code."""
    shutil.rmtree(scratch, ignore_errors=True)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's own core file is enough
        with contextlib.suppress(OSError):  # of SIGKILL, which has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
