# SPDX-License-Identifier: Apache-2.0
"""The engine contract at its hardest: another interpreter, weights that land in the middle of a request, adapters."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import subprocess
import sys
import types
import typing
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from relax_core.api import (
    Capabilities,
    Chosen,
    Delta,
    Engine,
    EngineSpec,
    GenerateRequest,
    Health,
    Manifest,
    Receipt,
    TensorInfo,
    Version,
    WeightTransport,
)
from relax_core.api.events import Span
from relax_core.api.weights import Payload, Resident, combined_fingerprint, tensor_fingerprint
from relax_core.rpc import messages


class Memory(WeightTransport):
    """Tensors in a table, adapters included."""

    payloads: ClassVar[frozenset[str]] = frozenset({"full", "delta", "lora"})
    stored: ClassVar[dict[str, dict[str, np.ndarray]]] = {}

    def send(
        self,
        version: Version,
        payload: Payload,
        base: str,
        tensors: Iterable[tuple[str, np.ndarray, str]],
        location: str,
    ) -> Manifest:
        kept = self.stored.setdefault(location, {})
        infos = []
        for name, array, dtype in tensors:
            kept[name] = array
            infos.append(TensorInfo(name, array.shape, dtype, tensor_fingerprint(array), array.nbytes))
        return Manifest(version, payload, tuple(infos), location, base, combined_fingerprint(infos))

    def receive(self, manifest: Manifest, resident: Resident | None = None) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        for info in manifest.tensors:
            array = self.stored[manifest.location][info.name]
            if tensor_fingerprint(array) != info.fingerprint:
                raise ValueError(f"{info.name}: its bytes are not those of the manifest")
            yield info, array

    def release(self, manifest: Manifest) -> None:
        del self.stored[manifest.location]


class Counting(Engine):
    """Says one number after another; each number is its weight's step, so that a change shows in the tokens."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        in_flight_updates=True, keeps_kv_across_versions=True, lora=True
    )

    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        self.version, self.base, self.adapter = spec.version, "base-1", np.zeros(1, np.float32)
        return {"vocab_size": 100, "max_context": spec.max_context, "fingerprint": self.base}

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Sequence[Delta]]:
        oldest = self.version.step
        for place in range(max(request.max_new_tokens for request in requests)):
            step = self.version.step
            live = [request for request in requests if place < request.max_new_tokens]
            yield [
                Delta(r.id, (step,), (-1.0,), step, oldest, "length" if place + 1 == r.max_new_tokens else "")
                for r in live
            ]
            await asyncio.sleep(0)

    async def update_weights(self, manifest: Manifest, transport: Chosen) -> Receipt:
        if not manifest.version.supersedes(self.version):
            raise ValueError(f"{manifest.version} is older than {self.version}")
        if manifest.payload == "lora" and manifest.base != self.base:
            raise ValueError(f"adapter is on top of {manifest.base}, not {self.base}")
        loaded = dict(Memory().receive(manifest))
        self.adapter, self.version = next(iter(loaded.values())), manifest.version
        return Receipt("engine-0", manifest.version, "wire", combined_fingerprint(loaded))

    async def health(self) -> Health:
        return Health(True, self.version)

    async def stop(self) -> None:
        pass


def publish(step: int, base: str = "base-1", incarnation: int = 0) -> Manifest:
    """An adapter under its peft name, on top of a base that every receiver has."""
    name = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = [(name, np.full((1, 4), float(step), np.float32), "F32")]
    return Memory().send(Version("actor", incarnation, step), "lora", base, tensors, f"memory-{incarnation}-{step}")


async def started() -> Counting:
    engine = Counting()
    await engine.start(EngineSpec({}, 64))
    return engine


async def test_weights_that_land_in_a_request_show_in_versions_and_in_its_cache() -> None:
    engine = await started()
    deltas: list[Delta] = []
    async for some in engine.generate([GenerateRequest("a", (1,), 4), GenerateRequest("b", (1,), 2)]):
        deltas += some
        if len(deltas) == 4:
            await engine.update_weights(publish(1), Chosen("weight-transport", "memory"))
    assert [(delta.id, delta.version, delta.oldest_cache) for delta in deltas] == [
        ("a", 0, 0), ("b", 0, 0), ("a", 0, 0), ("b", 0, 0), ("a", 1, 0), ("a", 1, 0),
    ]  # fmt: skip
    assert [delta.finish for delta in deltas[-3:]] == ["length", "", "length"]


async def test_an_adapter_is_a_publish_on_top_of_its_base_only() -> None:
    engine = await started()
    manifest, transport = publish(1), Chosen("weight-transport", "memory")
    receipt = await engine.update_weights(manifest, transport)
    assert receipt.fingerprint == manifest.fingerprint and manifest.size_bytes == 16
    with pytest.raises(ValueError, match="on top of"):
        await engine.update_weights(publish(2, base="base-2"), transport)
    with pytest.raises(ValueError, match="older"):
        await engine.update_weights(publish(0), transport)
    assert (await engine.health()).version.step == 1


OTHER_SIDE = """
import sys
from relax_core.api import Delta
from relax_core.rpc import messages
requests = messages.decode(sys.stdin.buffer.read())
deltas = tuple(Delta(r.id, (7,), (-0.5,), 3, 2, "length", routed_experts=b"\\x01\\x02") for r in requests)
heavy = tuple(name for name in ("torch", "ray", "pydantic", "jinja2") if name in sys.modules)
sys.stdout.buffer.write(messages.encode((deltas, heavy)))
"""


def test_another_interpreter_speaks_the_protocol_with_none_of_the_drivers_packages() -> None:
    requests = (GenerateRequest("a", (1, 2), 4, stop_tokens=(0,), media=("key#t=0.0,1.5",)),)
    answer = subprocess.run(
        [sys.executable, "-c", OTHER_SIDE],
        input=messages.encode(requests),
        capture_output=True,
        check=True,
        timeout=600,
    )
    deltas, heavy = messages.decode(answer.stdout)
    assert deltas == (Delta("a", (7,), (-0.5,), 3, 2, "length", routed_experts=b"\x01\x02"),)
    assert heavy == ()


def travelling() -> list[type]:
    messages.encode(None)
    return [cls for name, cls in sorted(messages._registry.items()) if cls.__module__.startswith("relax_core.api.")]


@pytest.mark.parametrize("cls", travelling(), ids=lambda cls: cls.__name__)
def test_every_data_type_of_the_api_comes_back_as_it_went(cls: type) -> None:
    value = example(cls)
    back = messages.decode(messages.encode(value))
    assert type(back) is cls
    assert plain(back) == plain(value)


def example(kind: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Some value of an annotated type, every optional field filled; what holds others of its own type holds none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return arguments[-1]
    if origin in (typing.Union, types.UnionType):
        return example(next(argument for argument in arguments if argument is not type(None)), inside)
    if origin is tuple:
        return tuple(example(one, inside) for one in arguments if one is not Ellipsis and one not in inside)
    if origin is frozenset:
        return frozenset({example(arguments[0], inside)})
    if origin is not None and issubclass(origin, Mapping):
        return {example(arguments[0], inside): example(arguments[1], inside)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return list(kind)[-1]
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind._fields
        hints = typing.get_type_hints(kind, localns={"np": np, "Span": Span})
        return kind(**{name: example(hints[name], (*inside, kind)) for name in names})
    simple: dict[Any, Any] = {
        int: 2**40, float: 0.25, str: "é", bool: True, bytes: b"\xff", np.ndarray: np.arange(3, dtype=np.uint16), Any: (1, "a"),
    }  # fmt: skip
    return simple[kind]


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value
