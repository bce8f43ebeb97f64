# SPDX-License-Identifier: Apache-2.0
"""A port for a listener is none that an outgoing connection of any process may be given meanwhile."""

import random
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from relax_core.rpc.host import free_port


def test_a_free_port_is_outside_the_range_of_outgoing_connections():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= free_port("127.0.0.1") <= last for _ in range(50))


def test_a_free_port_can_be_listened_at_and_a_taken_one_is_skipped(monkeypatch):
    monkeypatch.setattr("relax_core.rpc.host.PORTS", range(20_000, 20_100))
    with ExitStack() as taken:
        for _ in range(20):
            listener = taken.enter_context(socket.socket())
            listener.bind(("127.0.0.1", free_port("127.0.0.1")))


def test_processes_with_the_same_seed_get_different_ports():
    told = []
    for _ in range(2):
        random.seed(0)
        told.append([free_port("127.0.0.1") for _ in range(5)])
    assert told[0] != told[1]


def test_an_address_of_another_machine_has_none():
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")
