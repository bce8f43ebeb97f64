# SPDX-License-Identifier: Apache-2.0
"""A transport that engine or trainer can't use is refused before anything starts, with field, got and fix."""

from __future__ import annotations

import pytest

from relax_core.api.errors import ConfigError
from relax_core.config.compose import compose
from relax_core.registry.catalogue import Catalogue

SCRIPT = """
from relax_core.api import Capabilities, Engine, Trainer

class DiskEngine(Engine):
    capabilities = Capabilities(transports=frozenset({"disk"}))
    async def start(self, spec): raise NotImplementedError
    def generate(self, requests): raise NotImplementedError
    async def update_weights(self, manifest, transport): raise NotImplementedError
    async def health(self): raise NotImplementedError
    async def stop(self): raise NotImplementedError

class StoringTrainer(Trainer):
    def start(self, spec): raise NotImplementedError
    def plan(self, lengths, world_size, tokens_per_micro_batch=0): raise NotImplementedError
    def begin_update(self, denominators): raise NotImplementedError
    def accumulate(self, chunk, last): raise NotImplementedError
    def finish_update(self, denominators): raise NotImplementedError
    def forward(self, chunk, columns): raise NotImplementedError
    def publish(self, version, transport, location, payload="full", base=""): raise NotImplementedError
    def save(self, directory): raise NotImplementedError
    def load(self, directory): raise NotImplementedError
    def export(self, directory): raise NotImplementedError
"""


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    file = tmp_path_factory.mktemp("plugin") / "choosy.py"
    file.write_text(SCRIPT)
    return Catalogue.load([str(file)])


def composed(catalogue: Catalogue, *overrides: str) -> str:
    layer = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "algorithm": "grpo", "engine": "transformers",
             "trainer": "torch", "rewards": ["exact"]}  # fmt: skip
    return compose([layer], overrides, catalogue, on_disk=False).config.weights.name


@pytest.mark.parametrize("name", ["shared-memory", "disk", "http", "collective"])
def test_every_transport_in_the_box_serves_the_engine_and_the_trainer_in_the_box(
    catalogue: Catalogue, name: str
) -> None:
    assert composed(catalogue, f"weights={name}") == name
    assert composed(catalogue, f"weights={name}", "weights.payload=delta") == name


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_that_keep_their_weights_take_deltas(catalogue: Catalogue, engine: str) -> None:
    deltas = "weights.payload=delta", f"engine={engine}", "engine.keep_weights=true"
    assert composed(catalogue, *deltas) == "shared-memory"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights=collective", "engine=disk-engine"], "choose a transport that engine disk-engine supports: disk"),
        (["weights=carrier-pigeon"], "carrier-pigeon"),
        (
            ["weights.payload=delta", "engine=disk-engine", "weights=disk"],
            "engine disk-engine loads only full versions",
        ),
        (["weights.payload=delta", "engine=vllm"], "set engine.keep_weights = true"),
        (["weights=collective", "trainer=storing-trainer"], "trainer storing-trainer cannot send live weights"),
        (["weights=disk", "weights.bucket_mb=8"], "weights.bucket_mb"),
        (["weights=collective", "weights.port=70000"], "weights.port"),
        (["weights=collective", "weights.host=0.0.0.0"], "weights.host"),
    ],
)
def test_impossible_combinations_of_weights_are_refused(
    catalogue: Catalogue, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(catalogue, *overrides)
    assert message in str(caught.value) and "weights" in str(caught.value)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_media_that_an_engine_does_not_take_are_refused_with_one_that_does(catalogue: Catalogue, engine: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(catalogue, f"engine={engine}", 'media=["audio"]')
    told = f"got audio; engine {engine} accepts image, video: use transformers, or remove this processor"
    assert told in str(caught.value)
