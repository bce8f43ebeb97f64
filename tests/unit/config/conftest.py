# SPDX-License-Identifier: Apache-2.0
"""A catalogue of small real components, and a folder with a model, a task file and a configuration."""

from __future__ import annotations

import importlib
import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import field_validator

from relax_core.api.component import KINDS, Configurable
from relax_core.api.hooks import hook
from relax_core.api.options import Options, Secret
from relax_core.api.scaling import ScalingPolicy
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.loader import Loader

MINIMAL = """\
rewards = ["maths"]
[model]
path = "model"
[data]
train = "train.jsonl"
[rollout]
max_new_tokens = 16
"""


class Clip(Options):
    """GRPO with a clipped ratio."""

    clip_low: float = 0.2
    """Lower clip."""
    clip_high: float = 0.2
    """Upper clip."""


class Backend(Options):
    batch: int = 8
    """Sequences at once."""
    cache: Path | None = None
    """Folder for compiled kernels."""


class Judge(Options):
    key: Secret | None = None
    """Key of the service."""
    url: str = "http://127.0.0.1"
    """Its address."""
    extra: dict[str, Any] = {}
    """Passed on."""


def component(kind: str, model: type[Options] = Options, **attributes: Any) -> type[Configurable]:
    """A class of the kind that does nothing."""
    module, _, name = KINDS[kind].base.partition(":")
    base = getattr(importlib.import_module(module), name)
    abstract = {n: lambda *_, **__: None for n in dir(base) if getattr(getattr(base, n), "__isabstractmethod__", False)}
    return types.new_class(
        "Made", (base[model],), exec_body=lambda body: body.update(abstract, __doc__="Made for tests.", **attributes)
    )


class Parts:
    """A plugin that makes every part of a run."""

    @hook
    def relax_autoscaler(self, policy: ScalingPolicy) -> None: ...

    @hook
    def relax_external_workers(self, address: str) -> None: ...

    @hook
    def relax_media_pipeline(self) -> str:
        return "pipelines:Pipeline"


def catalogue_of_tests() -> Catalogue:
    loader = Loader()
    loader.manager.register(Parts())
    catalogue = Catalogue((), loader)
    catalogue.add("algorithm", "grpo", component("algorithm", Clip, min_group_size=2))
    catalogue.add("algorithm", "on-policy", component("algorithm", max_staleness=0, max_updates_per_step=1))
    catalogue.add("algorithm", "sft", component("algorithm", source="dataset"))
    catalogue.add("environment", "game", component("environment", gives_reward=True))
    catalogue.add("reward", "maths", component("reward"))
    for name in ("bubblewrap", "process"):
        catalogue.add("sandbox", name, component("sandbox"))
    catalogue.add("reward", "judge", component("reward", Judge))
    for kind, name in (("engine", "transformers"), ("engine", "vllm"), ("trainer", "torch")):
        catalogue.add(kind, name, component(kind, Backend))
    for kind, name in (
        ("environment", "single-turn"),
        ("model-family", "chat"),
        ("task-source", "files"),
        ("sampler", "shuffle"),
        ("bus", "in-process"),
        ("bus", "ray"),
        ("weight-transport", "shared-memory"),
        ("sink", "tensorboard"),
    ):
        catalogue.add(kind, name, component(kind))
    return catalogue


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    return catalogue_of_tests()


@pytest.fixture
def with_faults() -> Catalogue:
    """The same, a sink whose options model has a bug, and a reward whose option is a key of the core."""

    class Buggy(Options):
        size: int = 1

        @field_validator("size")
        @classmethod
        def _divide(cls, size: int) -> int:
            return 1 // size

    class Greedy(Options):
        weight: int = 1

    catalogue = catalogue_of_tests()
    catalogue.add("sink", "bad", component("sink", Buggy))
    catalogue.add("reward", "greedy", component("reward", Greedy))
    return catalogue


@pytest.fixture(scope="session")
def installed() -> Catalogue:
    """The components of all installed plugins."""
    return Catalogue.load()


def model_folder(
    folder: Path, vocab_size: int | None = None, tokens: Sequence[str] | None = (), **tokenizer: Any
) -> Path:
    """Make the folder of a model with a context of 64 tokens; no tokenizer where `tokens` is None."""
    folder.mkdir()
    size = {} if vocab_size is None else {"vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, **size}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    if tokens is not None:
        vocabulary = {token: place for place, token in enumerate(tokens)}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, **tokenizer}))
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with everything that a configuration needs."""
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (tmp_path / "my.toml").write_text(MINIMAL)
    return tmp_path
