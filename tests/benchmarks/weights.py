# SPDX-License-Identifier: Apache-2.0
"""Weights: seconds of a publish against one memory copy of the same bytes, hashing reported apart, on every transport.

Tensors are a decoder's in bf16. Two consecutive versions are one AdamW step on fp32 masters apart, at a learning rate of
reinforcement learning; a delta's bytes are against those of a full version. A publish ends when the receiver has all
tensors in memory of its own, checked. Sender and receiver are two threads of this process.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
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

    return master.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()


class Receiver:
    """A model's memory: what arrives is copied over what is there."""

    def __init__(self, tensors: Tensors) -> None:
        self.arrays = {name: array.copy() for name, array, _ in tensors}

    def take(self, transport: WeightTransport, manifest: Manifest) -> None:
        for info, array in transport.receive(manifest, lambda name: self.arrays[name]):
            np.copyto(self.arrays[info.name], array.reshape(self.arrays[info.name].shape))


def publish(
    sender: WeightTransport, taker: WeightTransport, step: int, payload: str, tensors: Tensors, location: str,
    receiver: Receiver,
) -> tuple[float, Manifest]:  # fmt: skip
    """Seconds from the first byte read to the last one in the receiver's memory."""
    base = str(Version("actor", 0, step - 1)) if payload == "delta" else ""
    begun = time.perf_counter()
    manifest = sender.send(Version("actor", 0, step), payload, base, tensors, location)  # type: ignore[arg-type]
    handing = threading.Thread(target=sender.transfer, args=(manifest, tensors, 1, WAIT_S)) if sender.live else None
    if handing is not None:
        handing.start()
    receiver.take(taker, manifest)
    seconds = time.perf_counter() - begun
    if handing is not None:
        handing.join()
    return seconds, manifest


def measure(name: str, versions: tuple[Tensors, Tensors, float], options: argparse.Namespace) -> list[report.Row]:
    before, after, changed = versions
    sender, taker = _build(name), _build(name)
    size = sum(array.nbytes for _, array, _ in before)
    copy_s, hash_s = _copy_seconds(before, options.repeats), _hash_seconds(before)
    location = tempfile.mkdtemp(
        prefix="relax-bench-", dir="/dev/shm" if sender.same_host and Path("/dev/shm").is_dir() else None
    )
    receiver, rows, step = Receiver(before), list[report.Row](), 0
    try:
        for payload in ("full", "delta") if "delta" in sender.payloads else ("full",):
            report.say(f"{name}: {payload} of {size / 1e6:.0f} MB")
            times, manifests = [], []
            for _ in range(options.repeats):
                step += 1
                seconds, manifest = publish(
                    sender, taker, step, payload, after if step % 2 else before, location, receiver
                )
                times.append(seconds)
                manifests.append(manifest)
                if len(manifests) > 1:
                    sender.release(manifests[-2])
            _check(receiver, after if step % 2 else before)
            rows.append(_row(name, payload, size, copy_s, hash_s, times, manifests[-1], changed))
    finally:
        shutil.rmtree(location)
    return rows


def _row(
    name: str, payload: str, size: int, copy_s: float, hash_s: float, times: list[float], manifest: Manifest, changed: float
) -> report.Row:  # fmt: skip
    seconds = sorted(times)[len(times) // 2]
    sent = manifest.wire_bytes or size
    sender_hash_s = manifest.seconds.get("hash", hash_s)
    moving_s = max(0.0, seconds - sender_hash_s - hash_s)
    return {
        "transport": name, "payload": payload, "MB": size / 1e6, "one copy s": copy_s, "publish s": seconds,
        "of it hashing s": sender_hash_s + hash_s, "copies without hashing": moving_s / copy_s, "copies": seconds / copy_s,
        "wire MB": sent / 1e6, "of full": sent / size, "values changed": changed,
    }  # fmt: skip


def _build(name: str) -> WeightTransport:
    from relax_core.api import Chosen
    from relax_core.plugins import Catalogue

    return Catalogue.load(()).build(Chosen("weight-transport", name))  # type: ignore[return-value]


def _copy_seconds(tensors: Tensors, repeats: int) -> float:
    target = [np.zeros_like(array) for _, array, _ in tensors]

    def once() -> float:
        begun = time.perf_counter()
        for into, (_, array, _) in zip(target, tensors, strict=True):
            np.copyto(into, array)
        return time.perf_counter() - begun

    return report.median(repeats, once)


def _hash_seconds(tensors: Tensors) -> float:
    """One pass; both sides make one."""
    begun = time.perf_counter()
    for _, array, _ in tensors:
        tensor_fingerprint(array)
    return time.perf_counter() - begun


def _check(receiver: Receiver, want: Tensors) -> None:
    for name, array, _ in want:
        if not np.array_equal(receiver.arrays[name], array):
            raise RuntimeError(f"{name}: what arrived is not what was published")


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


if __name__ == "__main__":
    main()
