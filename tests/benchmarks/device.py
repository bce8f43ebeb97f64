# SPDX-License-Identifier: Apache-2.0
"""Trainer and engine on one device: each piece of work beside a floor that this device sets, measured in the same run.

A training step is compared with matrix products of its counted operations. Offloading, loading, a publish and an engine's
update are compared with copies of the same bytes between pinned host memory and the device; a decoded token with one read
of the weights. A ratio of 1 is the floor. `mfu` is against the rate in the data sheet, where that is known.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.trainer import SIZES, Size, build, spec_of, step_of

PARTS = ("weights", "optimizer", "gradients")
BUFFER = 1 << 30
"""Largest number of bytes that one measured copy moves; more bytes take proportionally longer."""
ROWS, PROMPT, NEW = 64, 16, 96
"""Requests of the decoding, and tokens of each: they fit into the context of the engine fixture."""


class Device:
    """A device and its measured rates in bytes per second."""

    def __init__(self, name: str) -> None:
        import torch

        self.name, self._torch = name, torch

    def seconds(self, work: Callable[[], Any]) -> float:
        """Measure work to its end on the device."""
        self._synchronize()
        began = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - began

    def rates(self, size: int) -> dict[str, float]:
        """Measure copies of `size` bytes, at most `BUFFER`: to the device, from the device, within the device."""
        size, torch = min(size, BUFFER), self._torch
        here = torch.ones(size, dtype=torch.uint8, pin_memory=self.name == "cuda")
        there, other = (torch.empty(size, dtype=torch.uint8, device=self.name) for _ in range(2))
        copies = {"to": (there, here), "from": (here, there), "within": (other, there)}
        found = {}
        for name, (into, source) in copies.items():
            found[name] = size / report.median(
                5, lambda into=into, source=source: self.seconds(lambda: into.copy_(source))
            )
        return found

    def _synchronize(self) -> None:
        if self.name == "cuda":
            self._torch.cuda.synchronize()


def measure(model: str, size: Size, device: Device, repeats: int) -> list[report.Row]:
    """Return the rows of one model: a step, offloading, loading, a publish, an update, and decoding."""
    folder = Path(tempfile.mkdtemp(prefix="relax-bench-"))
    location = Path(tempfile.mkdtemp(prefix="relax-bench-", dir="/dev/shm"))
    try:
        build(size, folder)
        return [
            {"model": model, "device": device.name, **row} for row in _rows(size, device, repeats, folder, location)
        ]
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(location)


def _rows(size: Size, device: Device, repeats: int, folder: Path, location: Path) -> list[report.Row]:
    from relax_plugin_torch.rank import Rank

    from relax_core.api import Chosen, Version
    from relax_core.tensor_files.transport import SharedMemory
    from relax_core.testing.trainer import Reinforce

    trainer = Rank(Rank.options_model()(device=device.name))
    transport = SharedMemory()
    trainer.build = lambda chosen: Reinforce(chosen.options) if chosen.kind == "algorithm" else transport
    trainer.start(spec_of(size, str(folder)))
    try:
        rows = [_step(trainer, size, device, repeats)]
        rows += _offloading(trainer, device)
        chosen = Chosen("weight-transport", "shared-memory")
        version, began = Version("actor", 0, repeats + 1), time.perf_counter()
        manifest = trainer.publish(version, chosen, str(location))
        seconds = time.perf_counter() - began
        rates = device.rates(manifest.size_bytes)
        rows.append(_row("publish", seconds, manifest.size_bytes / rates["from"], moved=manifest.size_bytes))
    finally:
        trainer.stop()
    return rows + _engine(size, device, folder, manifest, transport)


def _step(trainer: Any, size: Size, device: Device, repeats: int) -> report.Row:
    from relax_plugin_workbench.estimate import measured_rate

    found = []
    for step in range(repeats + 1):
        rate = measured_rate(1, dtype=size.dtype)
        seconds = device.seconds(lambda step=step: step_of(trainer, size, step))
        found.append((seconds, trainer.work(), rate))
    seconds, work, rate = sorted(found[1:], key=lambda each: each[0])[repeats // 2]
    mfu = work.flops / seconds / work.peak_flops_per_s if work.peak_flops_per_s else None
    return {**_row("training step", seconds, work.flops / rate), "GFLOP": work.flops / 1e9, "mfu": mfu}


def _offloading(trainer: Any, device: Device) -> list[report.Row]:
    """Measure both directions; a CPU has no memory below it, so it frees little and gets no row."""
    if device.name != "cuda":
        return []
    freed, away = 0, time.perf_counter()
    freed = trainer.offload(PARTS)
    away = time.perf_counter() - away
    back = device.seconds(lambda: trainer.onload(PARTS))
    rates = device.rates(freed)
    return [
        _row("offload", away, freed / rates["from"], moved=freed), _row("load", back, freed / rates["to"], moved=freed),
    ]  # fmt: skip


def _engine(size: Size, device: Device, folder: Path, manifest: Any, transport: Any) -> list[report.Row]:
    from relax_plugin_transformers.engine import TransformersEngine
    from relax_plugin_transformers.options import TransformersOptions

    from relax_core.api import Version
    from relax_core.testing.engine_fixture import EngineFixture

    engine = TransformersEngine(TransformersOptions(device=device.name, max_batch_rows=ROWS))
    engine.build = lambda chosen: transport
    lab = EngineFixture(engine, str(folder), str(folder)).start(size.dtype, version=Version("actor", 0, 0))
    try:
        update = device.seconds(lambda: lab.update(manifest))
        rates = device.rates(manifest.size_bytes)
        requests = [
            lab.request([(row * 7 + place) % size.vocab for place in range(PROMPT)], NEW, seed=row)
            for row in range(ROWS)
        ]
        decode = report.median(1, lambda: device.seconds(lambda: lab.generate(*requests)))
    finally:
        lab.stop()
    read = 2.0 * rates["within"]  # a copy reads and writes each byte
    return [
        _row("engine's update", update, manifest.size_bytes / rates["to"], moved=manifest.size_bytes),
        {**_row("decoding", decode, NEW * manifest.size_bytes / read), "tokens/s": ROWS * NEW / decode},
    ]


def _row(what: str, seconds: float, floor: float, moved: float | None = None) -> dict[str, Any]:
    return {
        "what": what, "MB": None if moved is None else moved / 1e6, "GFLOP": None, "seconds": seconds, "floor s": floor,
        "seconds / floor": seconds / floor, "mfu": None, "tokens/s": None,
    }  # fmt: skip


def main() -> None:
    import torch

    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=["0.5B"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.set_defaults(repeats=3)
    options = parser.parse_args()
    set_up, rows = report.begin(options), list[report.Row]()
    for model in options.models:
        rows += measure(model, SIZES[model], Device(options.device), options.repeats)
    report.finish("device", set_up, rows, options)
