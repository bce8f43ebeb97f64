# SPDX-License-Identifier: Apache-2.0
"""Conformance checks for engines that claim to load adapters published alone. A part of `EngineSuite`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relax_core.api.weights import Manifest, Version
from relax_core.testing.engine_fixture import LORA, EngineFixture, Tensors, tensors_of
from relax_core.testing.engine_in_flight import PROMPT
from relax_core.testing.engine_truth import agrees

FAULTS = ("base", "unknown module", "half", "missing module", "rank")


class AdapterChecks:
    """Tests that an adapter lies over the folder's weights, whatever lay there before."""

    def needs(self, claimed: object, what: str) -> None:
        raise NotImplementedError

    def refused(self, lab: EngineFixture, manifest: Manifest) -> None:
        raise NotImplementedError

    @pytest.fixture
    def adapted(self, lab: EngineFixture) -> Iterator[EngineFixture]:
        """The engine; its first weights come back afterwards."""
        self.needs(lab.engine.capabilities.lora, "adapters")
        yield lab
        lab.update(lab.publish(source=lab.model))

    def test_each_adapter_lies_over_the_folder(self, adapted: EngineFixture, tmp_path: Path) -> None:
        for seed in (1, 2):
            tensors = adapter(adapted, seed)
            manifest = published(adapted, tensors)
            receipt = adapted.update(manifest)
            assert (receipt.version, receipt.fingerprint) == (manifest.version, manifest.wire_fingerprint)
            (got,) = adapted.generate(adapted.request(PROMPT, 9, seed=seed))
            agrees(merged(adapted, tensors, tmp_path / str(seed)), PROMPT, got)
            assert got.version == manifest.version.step

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_wrong_adapter_is_refused_whole(self, lab: EngineFixture, fault: str) -> None:
        self.needs(lab.engine.capabilities.lora, "adapters")
        good = adapter(lab, 1)
        wrong: dict[str, Tensors] = {
            "base": good,
            "unknown module": [*good, ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", *good[0][1:])],
            "half": good[1:],
            "missing module": good[2:],
            "rank": [(name, array[:1] if "lora_A" in name else array[:, :1], dtype) for name, array, dtype in good],
        }
        self.refused(lab, published(lab, wrong[fault], "elsewhere" if fault == "base" else ""))


def adapter(lab: EngineFixture, seed: int) -> Tensors:
    """Pairs for all modules that the lab's engine was told of."""
    random, rank = np.random.default_rng(seed), LORA["rank"]
    pairs: Tensors = []
    for name, array, _ in tensors_of(lab.model):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LORA["targets"]:
            rows, columns = array.shape
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                low = random.normal(0, 0.3, shape).astype(np.float32)
                pairs.append((f"base_model.model.{module}.lora_{side}.weight", low, "F32"))
    return pairs


def published(lab: EngineFixture, tensors: Tensors, base: str = "") -> Manifest:
    lab._step += 1
    version = Version("actor", lab.version.incarnation, lab._step)
    return lab._transport.send(version, "lora", base or str(lab.facts["fingerprint"]), tensors, lab.location)


def merged(lab: EngineFixture, tensors: Tensors, folder: Path) -> str:
    """The lab's model with an adapter, in float64 and then as a folder."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(lab.model, folder)
    parts = {name.removeprefix("base_model.model."): array.astype(np.float64) for name, array, _ in tensors}
    whole: dict[str, torch.Tensor] = {}
    for name, array, _ in tensors_of(lab.model):
        module, values = name.removesuffix(".weight"), array.astype(np.float64)
        if f"{module}.lora_A.weight" in parts:
            values = values + LORA["alpha"] / LORA["rank"] * (
                parts[f"{module}.lora_B.weight"] @ parts[f"{module}.lora_A.weight"]
            )
        whole[name] = torch.from_numpy(values.astype(np.float32))
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
