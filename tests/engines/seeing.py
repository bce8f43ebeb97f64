# SPDX-License-Identifier: Apache-2.0
"""What an engine must show with a tiny Qwen3-VL: it sees in processed images and videos what a plain forward sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from relax_contrib.recipes import families as tiny
from relax_core.api.engine import Delta, Engine
from relax_core.api.errors import InfrastructureError
from relax_core.api.modality import PlaceholderSpan, ProcessedMedia
from relax_core.api.weights import Version
from relax_core.learn.huggingface import MediaInputs
from relax_core.media.store import MediaStore
from relax_core.testing.engine_fixture import CONTEXT, TOLERANCE, EngineFixture, log_softmax

PATCH_VALUES = 3 * 2 * tiny.PATCH**2
NEVER = (tiny.IMAGE, tiny.VIDEO)


def seeing(folder: Path, seed: int) -> str:
    """Save a model with weights as far apart as those of a trained model."""
    model = tiny.build_model("qwen3_vl", seed, 32)
    model.config.text_config.max_position_embeddings = CONTEXT
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return str(folder)


def image(seed: int, high: int, wide: int) -> ProcessedMedia:
    values = np.random.default_rng(seed).normal(size=(high * wide, PATCH_VALUES)).astype(np.float32)
    tensors = {"pixel_values": values, "image_grid_thw": np.array([[1, high, wide]], np.int64)}
    return ProcessedMedia(f"{seed:032x}", tensors, high * wide // tiny.MERGE**2).laid_out("image")


def video(seed: int, frames: int, high: int, wide: int) -> ProcessedMedia:
    """A video of `frames` temporal patches, each a piece of its layout."""
    values = np.random.default_rng(seed).normal(size=(frames * high * wide, PATCH_VALUES)).astype(np.float32)
    tensors = {"pixel_values_videos": values, "video_grid_thw": np.array([[frames, high, wide]], np.int64)}
    each = high * wide // tiny.MERGE**2
    layout = tuple(PlaceholderSpan("video", each, seconds) for seconds in range(frames))
    return ProcessedMedia(f"{seed:032x}", tensors, frames * each, layout).laid_out("video")


IMAGES = (image(1, 4, 4), image(2, 4, 4), image(3, 6, 4))
VIDEOS = (video(4, 2, 4, 4), video(5, 3, 4, 6))
TIME = 15
"""A token that stands for the time before a frame."""


def prompt(shown: Sequence[ProcessedMedia]) -> tuple[int, ...]:
    tokens: list[int] = []
    for one in shown:
        for span in one.layout:
            timed, token = ([TIME], tiny.VIDEO) if span.kind == "video" else ([], tiny.IMAGE)
            tokens += [*timed, tiny.VISION_START, *[token] * span.size, tiny.VISION_END]
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


class SeeingSuite:
    """Tests of one engine; a subclass makes it."""

    @classmethod
    def make_engine(cls) -> Engine:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def lab(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFixture]:
        folder = tmp_path_factory.mktemp("seeing")
        for one in IMAGES + VIDEOS:
            MediaStore(folder / "media").put(one)
        first, second = (seeing(folder / str(seed), seed) for seed in (1, 2))
        lab = EngineFixture(self.make_engine(), first, second)
        yield lab.start(version=Version("actor", 0, 0), media=str(folder / "media"))
        lab.stop()

    def test_log_probs_agree_with_a_plain_forward_that_sees_the_same(self, lab: EngineFixture) -> None:
        first, second, third = IMAGES
        short, long = VIDEOS
        sets: list[tuple[ProcessedMedia, ...]] = [
            (first,), (second,), (third, first), (), (third,), (first,), (short,), (long,), (short, third, long), (long, long),
        ]  # fmt: skip
        results = lab.generate(*(asked(lab, shown, seed=number) for number, shown in enumerate(sets)))
        for shown, got in zip(sets, results, strict=True):
            agrees(lab.model, prompt(shown), shown, got)
        with pytest.raises(AssertionError):
            agrees(lab.model, prompt((first,)), (second,), results[0])
        other = video(6, 2, 4, 4)
        with pytest.raises(AssertionError):
            agrees(lab.model, prompt((short,)), (other,), results[6])

    @pytest.mark.parametrize("shown", [IMAGES[:1], VIDEOS[:1]], ids=["image", "video"])
    def test_media_are_encoded_again_with_new_weights_during_generation(
        self, lab: EngineFixture, shown: tuple[ProcessedMedia, ...]
    ) -> None:
        request, before = asked(lab, shown, CONTEXT - len(prompt(shown)), seed=1), lab.version.step
        try:
            found = lab.updated_amid([request], lambda: lab.update(lab.publish()))
            folders = {before: lab.model, lab.version.step: lab.other}
            parts = [part for part in found if part.tokens]
            assert {part.version for part in parts} == set(folders)
            so_far = request.tokens
            for part in parts:
                agrees(folders[part.version], so_far, shown, part)
                so_far += part.tokens
            (again,) = lab.generate(asked(lab, shown, seed=1))
            agrees(lab.other, prompt(shown), shown, again)
        finally:
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
        self, lab: EngineFixture, media: Any, error: Any, message: str
    ) -> None:
        long = (*prompt(IMAGES[:1]), *[12] * 64)  # so long that an engine may wait with equal prompts
        for name in ("one", "two") if error is ValueError else ("one",):  # a lost medium is waited for
            with pytest.raises(error, match=message):
                lab.generate(replace(lab.request(long, 2, media=media, suppress_tokens=NEVER), id=name))
        right = lab.request(long, 2, media=(IMAGES[0].key,), suppress_tokens=NEVER, seed=3)
        for got in lab.generate(right, replace(right, id="other", seed=4)):
            agrees(lab.model, long, IMAGES[:1], got)
