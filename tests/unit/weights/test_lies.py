# SPDX-License-Identifier: Apache-2.0
"""The suite of lies, judged by mutants: where a check is taken out the next proof catches it; where all are, it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_plugin_network_weights import plugin as network_weights

from relax_core import builtins
from relax_core.api.weights import Manifest, Resident, TensorInfo, WeightTransport
from relax_core.registry import Catalogue
from relax_core.tensor_files import delta
from relax_core.tensor_files.transport import Disk
from relax_core.testing.weight_transport import PAYLOADS, tensors_of
from relax_core.testing.weight_transport_corruptions import CORRUPTIONS, corruptions_of
from relax_core.testing.weight_transport_fixture import REFUSED, PublishedChain

BYTES_DIFFER = ("stale_bucket", "swapped_names", "flipped_bit_on_the_wire", "false_fingerprint_of_one")
"""Lies that only a look at the bytes can catch."""


class Skipping(Disk):
    """Hands on all tensors but one, and says nothing."""

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        return (item for at, item in enumerate(super().receive(manifest, resident)) if at != 0)


class Swapping(Disk):
    """Hands on the right bytes under the wrong names."""

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        (first, a), (second, b), *rest = super().receive(manifest, resident)
        return iter([(first, b), (second, a), *rest])


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transports that look at no bytes: every fingerprint that they compute is the one they want."""

    class Wanted(str):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = str.__hash__

    monkeypatch.setattr(delta, "tensor_fingerprint", lambda array: Wanted())


def begun(
    transport: Callable[[], WeightTransport], location: Path, payload: Any, honest: bool = True
) -> PublishedChain:
    return PublishedChain.begin(transport(), transport(), str(location), payload, tensors_of(payload), honest)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("lie", BYTES_DIFFER)
@pytest.mark.usefixtures("blind")
def test_the_receipt_detects_corruption_that_a_transport_misses(tmp_path: Path, lie: str, payload: str) -> None:
    chain = begun(Disk, tmp_path, payload)
    with pytest.raises(REFUSED):
        CORRUPTIONS[lie](chain)
    assert chain.registry.receivers("actor").get("engine-0", chain.version) == chain.version


@pytest.mark.parametrize("lie", BYTES_DIFFER)
@pytest.mark.usefixtures("blind")
def test_without_the_transports_look_and_honest_receipts_a_lie_passes_and_the_suite_fails(
    tmp_path: Path, lie: str
) -> None:
    chain = begun(Disk, tmp_path, "full", honest=False)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), pytest.raises(REFUSED):
        CORRUPTIONS[lie](chain)


@pytest.mark.parametrize("mutant", [Skipping, Swapping])
def test_the_receipt_detects_a_receiver_with_wrong_tensors(tmp_path: Path, mutant: type[Disk]) -> None:
    with pytest.raises(REFUSED, match="differs"):
        PublishedChain.begin(Disk(), mutant(), str(tmp_path), "full", tensors_of("full"))


def test_every_lie_is_tried_on_every_transport_of_this_repository() -> None:
    """What the suites run: each lie, by each transport, in each payload that can tell it."""
    catalogue, told = Catalogue.load(), {}
    for component in (*builtins.relax_weight_transports(), *network_weights.relax_weight_transports()):
        offered = catalogue.target("weight-transport", component.name)
        assert issubclass(offered, WeightTransport)
        told[component.name] = {p: len(corruptions_of(p)) for p in PAYLOADS if p in offered.payloads}
    each = {"full": 16, "delta": 18, "lora": 17}
    assert told == dict.fromkeys(("shared-memory", "disk", "http", "collective"), each)
    assert sum(sum(counts.values()) for counts in told.values()) == 204
