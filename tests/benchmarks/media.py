# SPDX-License-Identifier: Apache-2.0
"""Media: what Relax adds to the processor alone, what a sample with a medium weighs on the bus, and how high memory goes.

Decoding and processing run in one process, in turns: the processor called directly, and the same files through the pipeline of
a run (its child process, the token budget, the store on disk, the copy for people). Rows are a rollout's, n a group.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from relax_plugin_media.pipeline import ProcessedOncePipeline

from relax_core.api import Chosen, Media, Message
from relax_core.api.task import Part
from relax_core.media.source import read_source
from relax_core.media.store import MediaStore, key_bytes
from relax_core.rpc.isolated_pool import ProcessStarter
from tests.benchmarks import report

CONFIG = {
    "model_type": "tiny", "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "audio_config": {"num_mel_bins": 128, "n_window": 50},
}  # fmt: skip
TOKENS = 64
"""Of text in a row, beside its medium's."""
ROW_BYTES = 13
"""A token's in the columns of a rollout: id, mask, log-prob, version."""


def image(seed: int) -> bytes:
    """A JPEG of 640 x 480."""
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (15, 20, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((640, 480)).save(out, "JPEG")
    return out.getvalue()


def sound(seed: int) -> bytes:
    """Ten seconds at 44.1 kHz, two channels."""
    import soundfile

    wave = np.sin(np.outer(np.arange(441_000) / 44_100, (440.0 + seed, 660.0)) * 2 * np.pi)
    out = io.BytesIO()
    soundfile.write(out, (0.3 * wave).astype(np.float32), 44_100, format="WAV", subtype="PCM_16")
    return out.getvalue()


def video(seed: int) -> bytes:
    """Four seconds of 320 x 240 at 24 frames a second."""
    import av

    random, out = np.random.default_rng(seed), io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        still = np.kron(random.integers(0, 256, (15, 20, 3), np.uint8), np.ones((16, 16, 1), np.uint8))
        for number in range(96):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(still, number * 2, 1), format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()


KINDS = {"image": image, "audio": sound, "video": video}


class Places:
    """A family that holds place for nothing: only what is processed counts here."""

    placeholders: dict[str, int] = {}


async def measure(kind: str, folder: Path, options: argparse.Namespace) -> list[report.Row]:
    """The processor alone and the pipeline, on the same files in turns."""
    from relax_core.registry import Catalogue

    files = []
    for number in range(options.media):
        files.append(folder / f"{kind}{number}")
        files[-1].write_bytes(KINDS[kind](number))
    model = {"path": str(folder)}
    processor = Catalogue.load().build(Chosen("modality-processor", kind))
    alone_s, pipeline_s, peak = [], [], 0
    for turn in range(options.repeats):
        alone_s.append(_alone(processor, kind, files, model))
        seconds, peak = await _through_pipeline(kind, files, model, folder / f"store{turn}", options.preview_kb, peak)
        pipeline_s.append(seconds)
    alone, ours = (sorted(times)[len(times) // 2] for times in (alone_s, pipeline_s))
    ratios = sorted(mine / its for mine, its in zip(pipeline_s, alone_s, strict=True))
    return [
        {
            "medium": kind, "file kB": sum(map(_size, files)) / len(files) / 1e3, "alone /s": len(files) / alone,
            "relax /s": len(files) / ours, "time ratio": ratios[len(ratios) // 2], "lowest": ratios[0], "highest": ratios[-1],
            "process peak MB": peak / 1e6, **_on_the_bus(folder / "store0", options.group_size),
        }
    ]  # fmt: skip


def _alone(processor: Any, kind: Any, files: Sequence[Path], model: dict[str, str]) -> float:
    begun = time.perf_counter()
    for file in files:
        processor.process(Media(kind, str(file)), read_source(str(file)), model)
    return time.perf_counter() - begun


async def _through_pipeline(
    kind: Any, files: Sequence[Path], model: dict[str, str], store: Path, preview_kb: int, peak: int
) -> tuple[float, int]:
    """Seconds for all of them, and the highest memory of its child process so far."""
    from relax_core.runners.local.workers import LocalWorkers

    workers = LocalWorkers()
    choice = SimpleNamespace(chosen=Chosen("modality-processor", kind), name=kind, timeout_s=60.0, memory_mb=4096, max_mb=256,
                             writable=(),
                             preview_kb=preview_kb)  # fmt: skip
    pipeline = ProcessedOncePipeline(
        [choice],
        Places(),
        ProcessStarter(workers),
        str(store),
        model,
        limit_bytes=1 << 40,  # type: ignore[arg-type]
    )
    try:
        await pipeline.start()
        first = [Message("user", (Part(media=Media(kind, str(files[0]), view=None)),))]
        await pipeline.num_features(first)  # its imports are no work on media
        begun = time.perf_counter()
        for group, file in enumerate(files):
            said = [Message("user", (Part(media=Media(kind, str(file))),))]
            await pipeline.num_features(said)
            await pipeline.prepare(said, group)
        seconds = time.perf_counter() - begun
        for child in psutil.Process().children(recursive=True):
            peak = max(peak, _peak(child.pid))
    finally:
        await pipeline.stop()
        await workers.close()
    return seconds, peak


def _on_the_bus(store: Path, group_size: int) -> dict[str, float]:
    """Bytes a sample whose group has one medium: its key in each row and the tensors once, or the tensors in each row."""
    media = MediaStore(store)
    found = [media.get(key) for key in media.found()]
    tensors = float(np.mean([sum(tensor.nbytes for tensor in one.tensors.values()) for one in found]))
    row = (TOKENS + float(np.mean([one.num_placeholders for one in found]))) * ROW_BYTES
    referred = row + key_bytes([found[0].key]).nbytes
    return {
        "tensors kB": tensors / 1e3, "row kB, by reference": referred / 1e3, "row kB, in rows": (row + tensors) / 1e3,
        "moved a group, fold": group_size * (row + tensors) / (group_size * referred + tensors),
    }  # fmt: skip


def _peak(pid: int) -> int:
    """Highest resident memory of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _size(file: Path) -> int:
    return file.stat().st_size


async def run(options: argparse.Namespace) -> list[report.Row]:
    rows: list[report.Row] = []
    for kind in options.kinds:
        report.say(f"{options.media} media of kind {kind}, {options.repeats} times")
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
            rows += await measure(kind, Path(directory), options)
    return rows


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--media", type=int, default=32, help="files of each kind")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--preview-kb", type=int, default=512, help="of copies for people; 0: none")
    options = parser.parse_args()
    set_up = report.begin(options)
    report.finish("media", set_up, asyncio.run(run(options)), options)
