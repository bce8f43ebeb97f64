# SPDX-License-Identifier: Apache-2.0
"""Weights: seconds of a publish against one memory copy of the same bytes, hashing reported apart, on every transport.

Tensors are a decoder's in bf16. Two consecutive versions are one AdamW step on fp32 masters apart, at a learning rate of
reinforcement learning; a delta's bytes are against those of a full version. A publish ends when the receiver has all
tensors in memory of its own, checked. Sender and receiver are two processes, each on a core of its own where there are
two; the copy that publishes are held against is measured between them, into memory that is warm.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.api import Manifest, Version, WeightTransport, tensor_fingerprint
from tests.benchmarks import report

Tensors = list[tuple[str, np.ndarray, str]]
TRANSPORTS = ("shared-memory", "disk", "http", "collective")
SPREAD = 0.02
"""Standard deviation of the weights, as initialised models have it."""
ADAM = (0.9, 0.95, 1e-8)
WARM_STEPS = 4
WAIT_S = 60.0
WARM_PUBLISHES = 4
"""Not counted: they make and map the memory that later ones use again."""


def shapes(megabytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Layers of one width until there are so many bytes."""
    width, left = 1024 if megabytes < 500 else 2048, megabytes * 1_000_000 // 2
    layer = 0
    while left > 0:
        for name, shape in (
            ("self_attn.qkv_proj", (3 * width, width)), ("self_attn.o_proj", (width, width)),
            ("mlp.gate_up_proj", (8 * width, width)), ("mlp.down_proj", (width, 4 * width)), ("input_layernorm", (width,)),
        ):  # fmt: skip
            yield f"model.layers.{layer}.{name}.weight", shape
            left -= int(np.prod(shape))
        layer += 1


def two_versions(megabytes: int, lr: float) -> tuple[Tensors, Tensors, float]:
    """bf16 bits of a model before and after a step, and the share of values whose bits differ."""
    import torch

    torch.manual_seed(0)
    before: Tensors = []
    after: Tensors = []
    changed = total = 0
    for name, shape in shapes(megabytes):
        master = torch.randn(shape) * SPREAD
        optimizer = torch.optim.AdamW([master], lr=lr, betas=ADAM[:2], eps=ADAM[2], weight_decay=0.01)
        for _ in range(WARM_STEPS):
            master.grad = torch.randn(shape)
            optimizer.step()
        old = _bits(master)
        master.grad = torch.randn(shape)
        optimizer.step()
        new = _bits(master)
        before.append((name, old, "BF16"))
        after.append((name, new, "BF16"))
        changed, total = changed + int((old != new).sum()), total + old.size
    return before, after, changed / total


def _bits(master: Any) -> np.ndarray:
    import torch

    bits: np.ndarray = master.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
    return bits


class Receiver:
    """A model's memory in a process of its own: what arrives is copied over what is there."""

    def __init__(self, name: str, tensors: Tensors) -> None:
        self._transport, self.hashing = _build(name), HashTime()
        self.arrays = {name: array.copy() for name, array, _ in tensors}

    def take(self, manifest: Manifest) -> tuple[float, float]:
        """When it was done, and the seconds of it spent on hashing."""
        before = self.hashing.seconds
        for info, array in self._transport.receive(manifest, lambda name: self.arrays[name]):
            np.copyto(self.arrays[info.name], array.reshape(self.arrays[info.name].shape))
        return time.perf_counter(), self.hashing.seconds - before

    def fingerprints(self) -> dict[str, str]:
        return {name: tensor_fingerprint(array) for name, array in self.arrays.items()}


class HashTime:
    """Seconds that this process spends in fingerprints of tensors; at most one a process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        hashing = [module for module in list(sys.modules.values()) if getattr(module, "tensor_fingerprint", None)]
        for module in hashing:
            if module.__name__ not in (__name__, "relax_core.api.weights"):
                setattr(module, "tensor_fingerprint", self._timed)

    def _timed(self, array: np.ndarray) -> str:
        begun = time.perf_counter()
        try:
            return tensor_fingerprint(array)
        finally:
            self.seconds += time.perf_counter() - begun


def receive(name: str, tensors: Tensors, core: int | None, asked: Connection) -> None:
    """The receiver's process: takes manifests until there are no more, then says what it has."""
    _stay_on(core)
    receiver = Receiver(name, tensors)
    asked.send("ready")
    while (manifest := asked.recv()) is not None:
        asked.send(receiver.take(manifest))
    asked.send(receiver.fingerprints())


def _stay_on(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})


def publish(
    sender: WeightTransport, step: int, payload: str, tensors: Tensors, location: str, receiver: Connection
) -> tuple[float, float, Manifest]:
    """Seconds from the first byte read to the last one in the receiver's memory, those of them that went into hashing."""
    base = str(Version("actor", 0, step - 1)) if payload == "delta" else ""
    begun = time.perf_counter()
    manifest = sender.send(Version("actor", 0, step), payload, base, tensors, location)  # type: ignore[arg-type]
    receiver.send(manifest)
    if sender.live:
        sender.transfer(manifest, tensors, 1, WAIT_S)
    done, hashing = receiver.recv()  # perf_counter is one clock for all processes of a host
    return done - begun, hashing + manifest.seconds.get("hash", 0.0), manifest


def measure(name: str, versions: tuple[Tensors, Tensors, float], options: argparse.Namespace) -> list[report.Row]:
    before, after, _ = versions
    sender, own, rows = _build(name), os.sched_getaffinity(0), list[report.Row]()
    cores = sorted(own)[-2:] if len(own) > 1 else [None, None]
    location = tempfile.mkdtemp(
        prefix="relax-bench-", dir="/dev/shm" if sender.same_host and Path("/dev/shm").is_dir() else None
    )
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=receive, args=(name, before, cores[1], there), daemon=True)
    child.start()
    try:
        _stay_on(cores[0])
        here.recv()
        rows += _payloads(name, sender, versions, location, here, options)
        here.send(None)
        last = before if rows[-1]["step"] % 2 == 0 else after
        if here.recv() != {name: tensor_fingerprint(array) for name, array, _ in last}:
            raise RuntimeError(f"{name}: what arrived is not what was published")
    finally:
        os.sched_setaffinity(0, own)
        child.kill()
        child.join()
        shutil.rmtree(location)
    return rows


def _payloads(
    name: str, sender: WeightTransport, versions: tuple[Tensors, Tensors, float], location: str, receiver: Connection,
    options: argparse.Namespace,
) -> list[report.Row]:  # fmt: skip
    before, after, changed = versions
    copy, rows, step = Copy(before), list[report.Row](), 0
    last: Manifest | None = None
    for payload in ("full", "delta") if "delta" in sender.payloads else ("full",):
        report.say(f"{name}: {payload} of {copy.size / 1e6:.0f} MB")
        found = []
        for _ in range(options.repeats + WARM_PUBLISHES):
            step += 1
            seconds, hashing, manifest = publish(
                sender, step, payload, after if step % 2 else before, location, receiver
            )
            found.append((seconds, hashing, copy.seconds()))
            if last is not None:
                sender.release(last)
            last = manifest
        rows.append({**_row(name, payload, copy.size, found[WARM_PUBLISHES:], manifest, changed), "step": step})
    return rows


def _row(
    name: str, payload: str, size: int, found: list[tuple[float, float, float]], manifest: Manifest, changed: float
) -> report.Row:
    seconds, hashing, copy_s = (sorted(values)[len(values) // 2] for values in zip(*found, strict=True))
    moving = sorted(max(0.0, whole - hashing) for whole, hashing, _ in found)[len(found) // 2]
    sent = manifest.wire_bytes or size
    return {
        "transport": name, "payload": payload, "MB": size / 1e6, "one copy s": copy_s, "publish s": seconds,
        "of it hashing s": hashing, "copies without hashing": moving / copy_s, "copies": seconds / copy_s,
        "wire MB": sent / 1e6, "of full": sent / size, "values changed": changed,
    }  # fmt: skip


def _build(name: str) -> WeightTransport:
    from relax_core.api import Chosen
    from relax_core.registry import Catalogue

    return Catalogue.load(()).build(Chosen("weight-transport", name))  # type: ignore[return-value]


class Copy:
    """One copy of a version, into memory that is there."""

    def __init__(self, tensors: Tensors) -> None:
        self._pairs = [(np.ones_like(array), array) for _, array, _ in tensors]
        self.size = sum(array.nbytes for _, array, _ in tensors)

    def seconds(self) -> float:
        begun = time.perf_counter()
        for into, array in self._pairs:
            np.copyto(into, array)
        return time.perf_counter() - begun


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--megabytes", nargs="+", type=int, default=[100, 1000], help="of one version in bf16")
    parser.add_argument("--lr", type=float, default=1e-6)
    options = parser.parse_args()
    set_up, rows = report.begin(options), list[report.Row]()
    for megabytes in options.megabytes:
        report.say(f"making two versions of {megabytes} MB")
        versions = two_versions(megabytes, options.lr)
        for name in options.transports:
            rows += measure(name, versions, options)
    report.finish("weights", set_up, rows, options)
