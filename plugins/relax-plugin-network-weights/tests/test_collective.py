# SPDX-License-Identifier: Apache-2.0
"""The collective transport: conformance, and receivers that hang, die or come late, as processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from relax_plugin_network_weights.collective import Collective, CollectiveOptions

from relax_core.api.errors import InfrastructureError, RetryLater
from relax_core.api.weights import Manifest, Version, combined_fingerprint
from relax_core.rpc import messages
from relax_core.testing.weight_transport import WeightTransportSuite, some_tensors
from relax_core.testing.weight_transport_fixture import Transfer, moved

ONE = Version("actor", 0, 1)
SMALL = CollectiveOptions(bucket_mb=1, silence_s=3.0, patience_s=10.0)
PATIENT = CollectiveOptions(bucket_mb=1, silence_s=3.0, patience_s=300.0)
IMPATIENT = CollectiveOptions(bucket_mb=1, silence_s=3.0, patience_s=0.3)
JOIN_S = 300.0
"""For processes that must import torch first."""
Tensors = list[tuple[str, np.ndarray, str]]


class TestCollective(WeightTransportSuite):
    component = "collective"
    options = {"bucket_mb": 1, "silence_s": 3.0, "patience_s": 10.0}
    test_several_versions_are_kept_at_once = None  # only the newest is handed out


def large() -> Tensors:
    """More than the buffers between two processes hold, so that a receiver that stops is noticed on the way."""
    random = np.random.default_rng(1)
    return [(f"layers.{at}", random.integers(0, 255, 3_300_001, np.uint8), "U8") for at in range(6)]


def receiver(manifest: Manifest, behaviour: str) -> subprocess.Popen[bytes]:
    script = str(Path(__file__).with_name("live_receiver.py"))
    started = subprocess.Popen([sys.executable, script, behaviour], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdin is not None
    started.stdin.write(messages.encode(manifest))
    started.stdin.close()
    return started


def said(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    out = process.stdout.read().decode().strip()
    process.wait(300)
    process.stdout.close()
    return out


def test_receivers_that_hang_or_die_are_cut_off_and_the_others_take_all() -> None:
    sender, tensors = Collective(SMALL), large()
    manifest = sender.send(ONE, "full", "", tensors, "")
    started = {behaviour: receiver(manifest, behaviour) for behaviour in ("stops", "dies")}
    taken: list[str] = []
    well = threading.Thread(
        target=lambda: taken.append(combined_fingerprint([info for info, _ in Collective(PATIENT).receive(manifest)]))
    )
    well.start()
    try:
        assert sender.transfer(manifest, tensors, len(started) + 1, JOIN_S) == 1
        well.join()
        assert taken == [manifest.fingerprint]
        os.kill(started["stops"].pid, signal.SIGCONT)
        assert said(started["stops"]).startswith("InfrastructureError: actor@0.1: the sender is gone, or dropped")
        assert said(started["dies"]) == "" and started["dies"].returncode == 9
    finally:
        for process in started.values():
            process.kill()


def test_a_receiver_alone_is_served_when_the_sender_has_time() -> None:
    sender = Collective(SMALL)
    manifest = sender.send(ONE, "full", "", some_tensors(), "")
    assert sender.transfer(manifest, some_tensors(), 1, 0.0) == 0
    with Transfer(sender, manifest, some_tensors()) as transfer:
        assert len(list(Collective(SMALL).receive(manifest))) == len(some_tensors())
    assert transfer.took == 1


def test_a_receiver_without_a_sender_is_asked_to_retry_and_not_waited_for() -> None:
    sender = Collective(SMALL)
    manifest = sender.send(ONE, "full", "", some_tensors(), "")
    with pytest.raises(RetryLater, match=r"actor@0\.1: no transfer began within .*ask for it again"):
        list(Collective(IMPATIENT).receive(manifest))
    with Transfer(
        sender, manifest, some_tensors(), receivers=2
    ) as transfer:  # it counts who went away, and seats nobody
        list(Collective(SMALL).receive(manifest))
    assert transfer.took == 1


def test_a_receiver_that_asks_for_an_older_version_is_sent_to_the_newest() -> None:
    sender = Collective(SMALL)
    older = sender.send(ONE, "full", "", some_tensors(), "")
    found: list[BaseException] = []
    waiting = threading.Thread(target=lambda: _catch(lambda: list(Collective(SMALL).receive(older)), found))
    waiting.start()
    sender.send(ONE.next(), "full", "", moved(some_tensors()), "")
    waiting.join()
    _catch(lambda: list(Collective(SMALL).receive(older)), found)
    assert [type(error) for error in found] == [RetryLater, RetryLater]
    assert "no longer offered; ask for the newest version" in str(found[1])
    with pytest.raises(ValueError, match=r"actor@0\.1: this sender has actor@0\.2"):
        sender.transfer(older, some_tensors(), 1, 0.0)


def _catch(call: Callable[[], object], found: list[BaseException]) -> None:
    try:
        call()
    except InfrastructureError as error:
        found.append(error)


def test_a_lost_sender_is_reported_at_once() -> None:
    sender = Collective(SMALL)
    manifest = sender.send(ONE, "full", "", some_tensors(), "")
    del sender
    with pytest.raises(InfrastructureError, match="the sender is gone"):
        list(Collective(SMALL).receive(manifest))


def test_the_death_of_a_sender_is_an_error_for_its_receivers() -> None:
    sender, tensors = Collective(SMALL), large()
    manifest = sender.send(ONE, "full", "", tensors, "")
    broken = (tensor if at < 3 else 1 / 0 for at, tensor in enumerate(tensors))
    found: list[BaseException] = []
    taking = threading.Thread(target=lambda: _catch(lambda: list(Collective(SMALL).receive(manifest)), found))
    taking.start()
    with pytest.raises(ZeroDivisionError):
        sender.transfer(manifest, broken, 1, JOIN_S)  # type: ignore[arg-type]
    taking.join()
    assert isinstance(found[0], InfrastructureError) and "load again" in str(found[0])


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InfrastructureError, match=rf"weights\.port: .*{port}.*name a free port"):
            Collective(CollectiveOptions(port=port)).send(ONE, "full", "", some_tensors(), "")


def test_transfers_listen_only_on_this_host_and_keep_the_default_process_group() -> None:
    import psutil
    import torch.distributed

    def listening() -> set[tuple[str, int]]:
        return {tuple(c.laddr) for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}

    others, sender = listening(), Collective(SMALL)
    sent = sender.send(ONE, "full", "", some_tensors(), "")
    with Transfer(sender, sent, some_tensors()):
        arriving = Collective(SMALL).receive(sent)
        next(arriving)
        ours = listening() - others
        list(arriving)
    assert {address for address, _ in ours} == {"127.0.0.1"}
    assert not torch.distributed.is_initialized()


def test_a_receiver_needs_room_for_its_buckets_and_one_tensor_only() -> None:
    import tracemalloc

    sender, tensors = Collective(SMALL), large()
    manifest = sender.send(ONE, "full", "", tensors, "")
    with Transfer(sender, manifest, tensors):
        arriving = Collective(SMALL).receive(manifest)
        next(arriving)
        tracemalloc.start()
        for _ in arriving:
            pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2 * 3_300_001  # of 20 MB that came, sender's side included


def test_the_first_delta_is_whole_where_no_base_was_kept(tmp_path: Path) -> None:
    sender = Collective(SMALL)
    first = sender.send(ONE, "full", "", some_tensors(), str(tmp_path))
    second = sender.send(ONE.next(), "delta", str(first.version), moved(some_tensors()), str(tmp_path))
    third = sender.send(ONE.next().next(), "delta", str(second.version), moved(some_tensors(), 2), str(tmp_path))
    assert (second.payload, second.base) == ("full", "")
    assert (third.payload, third.base) == ("delta", str(second.version))
    assert list(tmp_path.iterdir()) == []  # what it keeps has no name
