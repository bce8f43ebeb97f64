# SPDX-License-Identifier: Apache-2.0
"""A program that confines itself with Landlock, runs a command under a seccomp filter, and kills all its processes.

`python -I -S confine.py SETTINGS COMMAND...`: the settings are JSON, see `main`. Landlock limits which files the command
opens and which processes it signals. The filter refuses system calls outside Landlock's scope: sockets, modes and
owners of files, namespaces, and memory and queues shared by name. The program runs without packages, so it imports only
the standard library.

The command runs in a Landlock domain nested in the domain of this process. Here `kill(-1)` therefore reaches every
process that the command started, even in a new session, and no process outside. The command can't signal this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import select
import signal
import struct
import sys
from collections.abc import Iterable, Sequence

MIN_ABI = 6
"""Landlock version of Linux 6.12, the first version that confines signals to a domain."""
KERNEL_OF_ABI = "Linux 6.12"
READ = 1 << 0 | 1 << 2 | 1 << 3
"""Landlock rights: execute files, read files, list folders."""
WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 12 | 1 << 13 | 1 << 14
"""Landlock rights: write files, remove folders and files, create folders, regular files, pipes and links, move,
truncate."""
FILE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
"""Landlock rights that apply to files; a rule for a file may contain no further rights."""
ALL_FILES, ALL_TCP, ALL_SCOPES = (1 << 16) - 1, 0b11, 0b11
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH, VERSION = 1, 1
SET_NO_NEW_PRIVS, SET_CHILD_SUBREAPER, SET_SECCOMP, CAPBSET_DROP, SET_SECUREBITS, SET_PDEATHSIG = 38, 36, 22, 24, 28, 1
NOROOT_LOCKED = 0b11
"""Secure bits that remove root's implicit capabilities and lock this setting."""
CAPABILITY_VERSION = 0x20080522
SECCOMP_FILTER = 2
REAP_MS = 1000
"""Milliseconds between two passes that reap ended orphan processes."""
READY, ENDED = b"ready", b" and ended"

MACHINES = {"x86_64": (0, 0xC000003E, 126), "aarch64": (1, 0xC00000B7, 91)}
"""For each machine: its column in the tables below, its architecture number in the filter, and the number of its system
call capset."""
LAST_CALL = 450
"""Highest system call number that passes; newer calls fail with ENOSYS, because their effects are not reviewed."""
REFUSED = {
    "socket": (41, 198), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "fsopen": (430, 430), "fsmount": (432, 432),
    "fspick": (433, 433), "fsconfig": (431, 431), "open_tree": (428, 428), "move_mount": (429, 429),
    "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "kcmp": (312, 272), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "inotify_init": (253, -1),
    "inotify_init1": (294, 26), "inotify_add_watch": (254, 27), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "syslog": (103, 116), "quotactl": (179, 60), "quotactl_fd": (443, 443),
}  # fmt: skip
"""Refused system calls and their numbers on each machine; -1: the machine does not have the call."""
CLONE, CLONE3, SOCKETPAIR, PRLIMIT64, IOCTL = (56, 220), (435, 435), (53, 199), (302, 261), (16, 29)
NAMESPACES = 0x7E020000
"""Flags of clone that create namespaces."""
SET_FILE_FLAGS = (0x40086602, 0x401C5820)
"""Requests of ioctl that change a file's attributes: FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR."""
LOAD, EQUAL, GREATER, SET, AND, RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
ALLOWED, REFUSES, ENDS = 0x7FFF0000, 0x00050000, 0x80000000

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(OSError):
    """The kernel refused a step of the confinement."""


def main() -> int:
    """Confine this process, run the command, and return its exit code.

    Settings: `alive`, read end of a pipe (when it closes, all processes are killed); `report`, write end of a pipe (gets
    `ready` or an error, then a note that all processes ended); `work`, working folder of the command; `read` and
    `write`, paths that the command may read or change.
    """
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    alive, report = settings["alive"], settings["report"]
    for descriptor in (alive, report):
        os.set_inheritable(descriptor, False)
    try:
        give_up_rights()
        confine_files(settings["read"], settings["write"])
        program = os.fork()
    except OSError as error:
        os.write(report, str(error).encode())
        return 126
    if not program:
        run_command(command, settings["work"], report)
    status = watch(alive, program)
    end_all()
    os.write(report, ENDED)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def landlock_abi() -> int:
    """Return the kernel's Landlock version. Raises Refused with the kernel's error if Landlock is not available."""
    return _asked("landlock_create_ruleset", _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION))


def give_up_rights() -> None:
    """Drop all capabilities permanently, and adopt orphaned descendants of this process (child subreaper)."""
    _asked("prctl(PR_SET_NO_NEW_PRIVS)", _libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _asked("prctl(PR_SET_CHILD_SUBREAPER)", _libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    if os.geteuid() == 0:
        _libc.prctl(SET_SECUREBITS, NOROOT_LOCKED, 0, 0, 0)
        for capability in range(64):
            _libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    header, nothing = struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)
    _asked("capset", _libc.syscall(MACHINES[platform.machine()][2], header, nothing))


def confine_files(read: Iterable[str], write: Iterable[str]) -> None:
    """Enter a Landlock domain that allows only these paths, no TCP port, and no signals to processes outside."""
    ruleset = _ruleset(ALL_FILES, ALL_TCP, ALL_SCOPES)
    for paths, rights in ((read, READ), (write, READ | WRITE)):
        for path in paths:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            given = rights if os.path.isdir(path) else rights & FILE
            rule = struct.pack("=Qi", given, opened)
            _asked(f"landlock_add_rule({path})", _libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0))
            os.close(opened)
    _enter(ruleset)


def run_command(command: Sequence[str], work: str, report: int) -> None:
    """Replace this process by the confined command, which can't signal its watcher. Never returns."""
    try:
        os.setsid()
        _libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _enter(_ruleset(0, 0, ALL_SCOPES))
        os.chdir(work)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, and the command would inherit this
            signal.signal(number, signal.SIG_DFL)
        filter_calls()
    except OSError as error:
        os.write(report, str(error).encode())
        os._exit(126)
    os.write(report, READY)
    try:
        os.execve(command[0], list(command), os.environ)
    except OSError as error:
        print(f"{command[0]} can't be started: {error.strerror}", file=sys.stderr)
    os._exit(127)


def filter_calls() -> None:
    """Install the system call filter for this process and all of its future descendants."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions(platform.machine()))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _asked("prctl(PR_SET_SECCOMP)", _libc.prctl(SET_SECCOMP, SECCOMP_FILTER, program, 0, 0))


def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter as BPF instructions (code, jump if true, jump if false, value).

    A jump is the number of instructions to skip.
    """
    column, architecture, _ = MACHINES[machine]
    not_permitted, no_call = REFUSES | errno.EPERM, REFUSES | errno.ENOSYS
    number, low = (LOAD, 0, 0, 0), [(LOAD, 0, 0, 16 + 8 * at) for at in range(6)]
    found = [
        (LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, ENDS), number,
        (GREATER, 0, 1, LAST_CALL), (RETURN, 0, 0, no_call),
        (EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, no_call),  # C libraries fall back to clone, which is checkable
    ]  # fmt: skip
    for numbers in REFUSED.values():
        if numbers[column] >= 0:
            found += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, not_permitted)]
    refuse, allow = (RETURN, 0, 0, not_permitted), (RETURN, 0, 0, ALLOWED)
    found += [(EQUAL, 0, 4, CLONE[column]), low[0], (SET, 0, 1, NAMESPACES), refuse, allow]
    found += [
        (EQUAL, 0, 4, PRLIMIT64[column]),
        low[0],
        (EQUAL, 1, 0, 0),
        refuse,
        allow,
    ]  # pid 0: the process's own limits
    found += [
        # Only AF_UNIX (1) with SOCK_STREAM (1) or SOCK_SEQPACKET (5): datagram sockets could send to any address.
        (EQUAL, 0, 8, SOCKETPAIR[column]), low[0], (EQUAL, 0, 4, 1), low[1], (AND, 0, 0, 0xF),
        (EQUAL, 2, 0, 1), (EQUAL, 1, 0, 5), refuse, allow,
    ]  # fmt: skip
    found += [(EQUAL, 0, 4, IOCTL[column]), low[1], *((EQUAL, 1 - at, at, c) for at, c in enumerate(SET_FILE_FLAGS))]
    return [*found, refuse, allow]


def watch(alive: int, program: int) -> int:
    """Wait until the program ends, and return its wait status; return 0 if the write end of `alive` closes first."""
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    poll.register(os.pidfd_open(program), select.POLLIN)
    while not any(descriptor == alive for descriptor, _ in poll.poll(REAP_MS)):
        ended = -1
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == program:
                return status
    return 0


def end_all() -> None:
    """Kill all processes of this Landlock domain except this process, and wait for their end.

    A single `kill(-1)` leaves no gap in which a fork could escape.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _ruleset(files: int, tcp: int, scopes: int) -> int:
    asked = struct.pack("=QQQ", files, tcp, scopes)
    return _asked("landlock_create_ruleset", _libc.syscall(CREATE_RULESET, asked, ctypes.c_size_t(len(asked)), 0))


def _enter(ruleset: int) -> None:
    _asked("landlock_restrict_self", _libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _asked(what: str, answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise Refused(number, f"{what}: {os.strerror(number)}")
    return answer


if __name__ == "__main__":
    sys.exit(main())
