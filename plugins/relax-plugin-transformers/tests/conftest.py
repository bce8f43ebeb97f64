# SPDX-License-Identifier: Apache-2.0
"""Engines over tiny models, which stop with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from relax_plugin_transformers.engine import TransformersEngine
from relax_plugin_transformers.options import TransformersOptions

from relax_core.api.weights import Version
from relax_core.tensor_files.transport import Disk
from relax_core.testing.engine_fixture import EngineFixture, tiny_qwen3


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    first, second = (tiny_qwen3(str(tmp_path_factory.mktemp("model")), seed) for seed in (1, 2))
    return first, second


def started(first: str, second: str, options: dict[str, Any] | None = None, **spec: Any) -> EngineFixture:
    engine = TransformersEngine(TransformersOptions(**(options or {})))
    engine.build = lambda chosen: Disk()
    return EngineFixture(engine, first, second).start(**{"version": Version("actor", 0, 0), **spec})


@pytest.fixture(scope="module")
def labs() -> Iterator[Callable[..., EngineFixture]]:
    """Start engines over two model folders; all stop after the module."""
    yield from stopping()


@pytest.fixture
def start_lab() -> Iterator[Callable[..., EngineFixture]]:
    """Start engines over two model folders; all stop after the test."""
    yield from stopping()


@pytest.fixture
def lab(start_lab: Callable[..., EngineFixture], folders: tuple[str, str]) -> EngineFixture:
    return start_lab(*folders)


def stopping() -> Iterator[Callable[..., EngineFixture]]:
    made: list[EngineFixture] = []

    def start(*folders: str, **how: Any) -> EngineFixture:
        made.append(started(*folders, **how))
        return made[-1]

    yield start
    for lab in made:
        lab.stop()
