# SPDX-License-Identifier: Apache-2.0
"""Program that runs a server, and kills it and all processes that it started when the worker or the server ends.

`python guard.py DESCRIPTOR COMMAND...`: the descriptor is the read end of a pipe whose write end the worker holds and
never writes to. This process is a subreaper: it becomes the parent of the server's orphans, so that no process escapes
by leaving its parent or session. The server inherits this process's standard input and output, so its messages do not
pass through this process.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys

PR_SET_CHILD_SUBREAPER = 36
REAP_MS = 1000
"""Interval in milliseconds at which dead orphans are reaped."""


def main() -> int:
    alive, command = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(alive, False)
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        print("the kernel refuses to make this process a subreaper", file=sys.stderr)
        return 126
    try:
        server = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        print(f"{command[0]} can't be started: {error.strerror}", file=sys.stderr)
        return 127
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # only the server holds its pipes, so that the worker sees them close
        os.dup2(nothing, stream)
    status = watch(alive, server)
    end_all()
    return os.waitstatus_to_exitcode(status) & 0xFF


def watch(alive: int, server: int) -> int:
    """Wait until the server or the worker has ended; return the server's status."""
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    poll.register(os.pidfd_open(server), select.POLLIN)
    while not any(descriptor == alive for descriptor, _ in poll.poll(REAP_MS)):
        ended = -1
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == server:
                return status
    return 0


def end_all() -> None:
    """Kill child processes until all have ended; children of a killed process become children of this process."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for entry in os.listdir("/proc"):
                with contextlib.suppress(OSError):
                    if entry.isdigit() and parent_of(entry) == os.getpid():
                        os.kill(int(entry), signal.SIGKILL)
            os.waitpid(-1, 0)


def parent_of(process: str) -> int:
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    sys.exit(main())
