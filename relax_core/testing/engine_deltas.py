# SPDX-License-Identifier: Apache-2.0
"""Conformance checks for engines that claim to load deltas. A part of `EngineSuite`.

A suite whose engine has them behind an option turns that on in its `options`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax_core.api.weights import Manifest, Version
from relax_core.testing.engine_adapters import adapter, published
from relax_core.testing.engine_fixture import EngineFixture, Tensors, tensors_of
from relax_core.testing.engine_in_flight import PROMPT
from relax_core.testing.engine_truth import agrees

FAULTS = ("base", "damaged", "other model")


class DeltaChecks:
    """Tests that a delta gives what the whole version would, or nothing."""

    def needs(self, claimed: object, what: str) -> None:
        raise NotImplementedError

    def refused(self, lab: EngineFixture, manifest: Manifest) -> None:
        raise NotImplementedError

    @pytest.fixture
    def based(self, lab: EngineFixture) -> Iterator[EngineFixture]:
        """The engine with its first weights published, so that a delta can follow; they come back afterwards."""
        self.needs(lab.engine.capabilities.delta, "deltas")
        lab.update(lab.publish(source=lab.model))
        yield lab
        lab.update(lab.publish(source=lab.model))

    def test_deltas_give_what_the_whole_version_would(self, based: EngineFixture, tmp_path: Path) -> None:
        tensors = tensors_of(based.model)
        for seed in (1, 2):
            tensors = moved(tensors, seed)
            manifest = delta(based, tensors)
            assert manifest.wire_bytes < manifest.size_bytes / 2
            receipt = based.update(manifest)
            assert (receipt.version, receipt.fingerprint) == (manifest.version, manifest.wire_fingerprint)
            assert receipt.level == based.engine.capabilities.receipts
            (got,) = based.generate(based.request(PROMPT, 9, seed=seed))
            agrees(folder_of(based, tensors, tmp_path / str(seed)), PROMPT, got)
            assert got.version == manifest.version.step
        whole = based.update(based.publish(tensors))
        assert (whole.resident, whole.layout) == (receipt.resident, receipt.layout), "memory differs from the whole's"

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_wrong_delta_is_refused_whole(self, based: EngineFixture, fault: str) -> None:
        first = moved(tensors_of(based.model), 1)
        have = based.version
        delta(based, first)  # this engine does not take it
        manifest = delta(based, moved(first, 2))
        if fault == "damaged":  # of the right version by its own word, of another's bytes
            manifest = replace(manifest, base=str(have))
        if fault == "other model":
            manifest = replace(manifest, tensors=manifest.tensors[1:])
        self.refused(based, manifest)

    def test_a_delta_over_an_adapter_is_refused(self, based: EngineFixture) -> None:
        self.needs(based.engine.capabilities.lora, "adapters")
        base = published(based, adapter(based, 1), based.publish(source=based.model).fingerprint)
        based.update(base)
        laid = based.version
        based._transport.send(laid, "full", "", tensors_of(based.model), based.location)
        with pytest.raises(ValueError, match="an adapter lies over"):
            based.update(delta(based, moved(tensors_of(based.model), 1)))
        assert based.version == laid


def delta(lab: EngineFixture, tensors: Tensors) -> Manifest:
    """On top of what was sent last."""
    base = Version("actor", lab.version.incarnation, lab._step)
    lab._step += 1
    return lab._transport.send(base.next(), "delta", str(base), tensors, lab.location)


def moved(tensors: Tensors, seed: int) -> Tensors:
    """Some elements of some tensors."""
    random = np.random.default_rng(seed)
    changed = [np.array(array) for _, array, _ in tensors]
    for array in changed[::3]:
        array[random.random(array.shape) < 0.1] *= np.float32(1.1)
    return [(name, array, dtype) for (name, _, dtype), array in zip(tensors, changed, strict=True)]


def folder_of(lab: EngineFixture, tensors: Tensors, folder: Path) -> str:
    """The lab's model with these tensors."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(lab.model, folder)
    save_file(
        {name: torch.from_numpy(np.array(a)) for name, a, _ in tensors}, folder / "model.safetensors", {"format": "pt"}
    )
    return str(folder)
