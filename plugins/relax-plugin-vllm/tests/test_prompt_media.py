# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-VL sees in vLLM what a plain forward of it sees: processed images by key, new weights, refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_plugin_vllm.engine import VllmEngine
from relax_plugin_vllm.options import VllmOptions
from transformers import AutoModelForImageTextToText

from relax_contrib.recipes import families as tiny
from relax_core.api.engine import Delta
from relax_core.api.errors import ConfigError, InfrastructureError
from relax_core.api.modality import ProcessedMedia
from relax_core.api.weights import Version
from relax_core.learn.huggingface import MediaInputs
from relax_core.media.store import MediaStore
from relax_core.tensor_files.transport import Disk
from relax_core.testing.engine_fixture import TOLERANCE, EngineFixture, log_softmax, tiny_qwen3

PATCH_VALUES = 3 * 2 * tiny.PATCH**2
NEVER = (tiny.IMAGE, tiny.VIDEO)


def seeing(folder: Path, seed: int) -> str:
    """Its weights as far apart as those of a trained model."""
    model = tiny.build_model("qwen3_vl", seed, 32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return str(folder)


def image(seed: int, high: int, wide: int) -> ProcessedMedia:
    values = np.random.default_rng(seed).normal(size=(high * wide, PATCH_VALUES)).astype(np.float32)
    tensors = {"pixel_values": values, "image_grid_thw": np.array([[1, high, wide]], np.int64)}
    return ProcessedMedia(f"{seed:032x}", tensors, high * wide // tiny.MERGE**2).laid_out("image")


IMAGES = (image(1, 4, 4), image(2, 4, 4), image(3, 6, 4))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFixture]:
    folder = tmp_path_factory.mktemp("seeing")
    for one in IMAGES:
        MediaStore(folder / "media").put(one)
    engine = VllmEngine(VllmOptions())
    engine.build = lambda chosen: Disk()
    first, second = (seeing(folder / str(seed), seed) for seed in (1, 2))
    lab = EngineFixture(engine, first, second).start(version=Version("actor", 0, 0), media=str(folder / "media"))
    yield lab
    lab.stop()


def prompt(shown: Sequence[ProcessedMedia]) -> tuple[int, ...]:
    tokens: list[int] = []
    for one in shown:
        tokens += [tiny.VISION_START, *[tiny.IMAGE] * one.num_placeholders, tiny.VISION_END]
    return (*tokens, 12, 13, 14)


def asked(lab: EngineFixture, shown: Sequence[ProcessedMedia], count: int = 9, **fields: Any) -> Any:
    keys = tuple(one.key for one in shown)
    return lab.request(prompt(shown), count, media=keys, suppress_tokens=NEVER, **fields)


def plain(folder: str, tokens: Sequence[int], shown: Sequence[ProcessedMedia]) -> np.ndarray:
    """Log-probs [tokens, vocabulary] after each token, by transformers."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([list(tokens)])
    inputs = MediaInputs(model).of(ids, torch.ones_like(ids, dtype=torch.bool), [shown])[0] if shown else {}
    with torch.no_grad():
        logits = model(input_ids=ids, **inputs, use_cache=False).logits[0]
    logits[:, list(NEVER)] = -1e9
    return log_softmax(logits.numpy())


def agrees(folder: str, before: tuple[int, ...], shown: Sequence[ProcessedMedia], got: Delta) -> None:
    rows = plain(folder, (*before, *got.tokens), shown)[len(before) - 1 : -1]
    np.testing.assert_allclose(got.log_probs, rows[np.arange(len(got.tokens)), list(got.tokens)], atol=TOLERANCE)


def test_log_probs_agree_with_a_plain_forward_that_sees_the_same(lab: EngineFixture) -> None:
    first, second, third = IMAGES
    sets: list[tuple[ProcessedMedia, ...]] = [(first,), (second,), (third, first), (), (third,), (first,)]
    results = lab.generate(*(asked(lab, shown, seed=number) for number, shown in enumerate(sets)))
    for shown, got in zip(sets, results, strict=True):
        agrees(lab.model, prompt(shown), shown, got)
    with pytest.raises(AssertionError):
        agrees(lab.model, prompt((first,)), (second,), results[0])


def test_media_are_encoded_again_with_new_weights_during_generation(lab: EngineFixture) -> None:
    shown = IMAGES[:1]
    request = asked(lab, shown, 60, seed=1)

    async def start() -> tuple[Any, list[Delta]]:
        stream = lab.engine.generate([request])
        parts = list(await anext(stream))
        await lab.engine.pause()
        return stream, parts

    async def finish(stream: Any, parts: list[Delta]) -> list[Delta]:
        await lab.engine.resume()
        return parts + [delta async for deltas in stream for delta in deltas]

    before = lab.version.step
    stream, parts = lab.run(start())
    lab.update(lab.publish())
    folders = {before: lab.model, lab.version.step: lab.other}
    parts = [part for part in lab.run(finish(stream, parts)) if part.tokens]
    assert {part.version for part in parts} == set(folders)
    so_far = request.tokens
    for part in parts:
        agrees(folders[part.version], so_far, shown, part)
        so_far += part.tokens
    (again,) = lab.generate(asked(lab, shown, seed=1))
    agrees(lab.other, prompt(shown), shown, again)
    lab.update(lab.publish(source=lab.model))


@pytest.mark.parametrize(
    ("media", "error", "message"),
    [
        ((), ValueError, "4 image placeholders for 0 features"),
        ((IMAGES[2].key,), ValueError, "4 image placeholders for 6 features"),
        (("ab" * 16,), InfrastructureError, "can't be read"),
    ],
)
def test_media_that_do_not_fit_are_refused_before_generation(
    lab: EngineFixture, media: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        lab.generate(lab.request(prompt(IMAGES[:1]), 2, media=media, suppress_tokens=NEVER))
    (got,) = lab.generate(asked(lab, IMAGES[:1], 2))
    assert len(got.tokens) == 2


def test_a_model_that_does_not_see_is_refused_where_the_run_has_media(tmp_path: Path) -> None:
    lab = EngineFixture(VllmEngine(VllmOptions()), tiny_qwen3(str(tmp_path / "blind"), 1), "")
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM"):
        lab.start(media=str(tmp_path))
