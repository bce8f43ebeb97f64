# SPDX-License-Identifier: Apache-2.0
"""A version moves from one GPU to another by NCCL, bucket by bucket, and arrives with every byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from relax_plugin_network_weights.collective import Collective, CollectiveOptions

from relax_core.api.weights import Version
from relax_core.rpc import messages

BACKEND, JOIN_S = "nccl", 300.0


@pytest.mark.gpu(2)
def test_a_version_moves_between_two_gpus() -> None:
    random = np.random.default_rng(0)
    tensors = [(f"layers.{layer}", random.integers(0, 255, 3_300_001, np.uint8), "U8") for layer in range(6)]
    sender = Collective(CollectiveOptions(bucket_mb=1, backend=BACKEND))
    for step in (1, 2):
        manifest = sender.send(Version("actor", 0, step), "full", "", tensors, "")
        script = str(Path(__file__).with_name("live_receiver.py"))
        receiver = subprocess.Popen([sys.executable, script, "gpu"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert receiver.stdin is not None
            receiver.stdin.write(messages.encode(manifest))
            receiver.stdin.close()
            assert sender.transfer(manifest, tensors, 1, JOIN_S) == 1
            assert receiver.stdout is not None and receiver.stdout.read().decode().strip() == manifest.fingerprint
        finally:
            receiver.kill()
            receiver.wait()
