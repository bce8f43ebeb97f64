# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-VL sees the same in the engine and in the trainer: one preprocessing, the same log-probs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.api import EngineSpec, GenerateRequest, Media, ProcessedMedia, Ragged, RowBatch, RowId
from relax_core.media.store import MediaStore, key_bytes

torch = pytest.importorskip("torch")

from relax_plugin_omni.image import ImageOptions, ImageProcessor  # noqa: E402
from relax_plugin_torch.model import load_model  # noqa: E402
from relax_plugin_torch.policy import Policy  # noqa: E402
from relax_plugin_torch.row_media import RowMedia  # noqa: E402
from relax_plugin_transformers.engine import TransformersEngine  # noqa: E402

from relax_contrib.recipes import families as tiny  # noqa: E402
from relax_core.learn import PackedBatch  # noqa: E402

WORDS = ("which", "colour", "?", "red", "green", "blue", "yellow")
NEVER = (tiny.IMAGE, tiny.VIDEO)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing") / "model"
    tiny.save_tokenizer(WORDS, folder)
    tiny.build_model("qwen3_vl", 3, 32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def media(folder: Path) -> list[ProcessedMedia]:
    """Three small images and a larger one, in the store beside the model."""
    made = []
    for number, side in enumerate((32, 32, 32, 64)):
        processor = ImageProcessor(ImageOptions(min_tokens=(side // 16) ** 2, max_tokens=(side // 16) ** 2))
        made.append(processor.process(Media("image", ""), picture(number), {"path": str(folder)}))
        MediaStore(folder / "media").put(made[-1])
    return made


def picture(seed: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 40, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def prompt(shown: list[ProcessedMedia]) -> tuple[int, ...]:
    tokens: list[int] = []
    for one in shown:
        tokens += [tiny.VISION_START, *[tiny.IMAGE] * one.num_placeholders, tiny.VISION_END]
    return (*tokens, 8, 9, 10)


def requests(media: list[ProcessedMedia], new_tokens: int = 9) -> list[GenerateRequest]:
    """One image, another, two, none, a larger one, and the first once more: two samples each."""
    sets = [media[:1], media[1:2], [media[3], media[2]], [], media[3:], media[:1]]
    return [
        GenerateRequest(
            f"{number}-{sample}", prompt(shown), new_tokens, seed=10 * number + sample, suppress_tokens=NEVER,
            media=tuple(one.key for one in shown),
        )
        for number, shown in enumerate(sets) for sample in range(2)
    ]  # fmt: skip


async def sampled(engine: Any, asked: list[GenerateRequest]) -> dict[str, tuple[list[int], list[float]]]:
    out: dict[str, tuple[list[int], list[float]]] = {}
    async for deltas in engine.generate(asked):
        for delta in deltas:
            tokens, log_probs = out.setdefault(delta.id, ([], []))
            tokens += delta.tokens
            log_probs += delta.log_probs
            assert delta.finish != "error", delta.error
    return out


@pytest.fixture
async def engine(folder: Path):
    started = TransformersEngine()
    await started.start(EngineSpec({"path": str(folder), "dtype": "float32"}, 512, media=str(folder / "media")))
    yield started
    await started.stop()


def policy(folder: Path) -> Policy:
    model = load_model(str(folder), "sdpa", torch.device("cpu"))
    row_media = RowMedia(model, str(folder / "media"))
    return Policy(
        model,
        temperature=1.0,
        autocast=None,
        max_logits=1 << 20,
        share_prefixes=True,
        row_media=row_media,
        suppress=NEVER,
    )


def rows(asked: list[GenerateRequest], said: dict[str, tuple[list[int], list[float]]]) -> RowBatch:
    ids = tuple(RowId(int(one.id[0]), int(one.id[2]), 0, 0) for one in asked)
    tokens = [np.array([*one.tokens, *said[one.id][0]], np.int32) for one in asked]
    mask = [np.array([0] * len(one.tokens) + [1] * len(said[one.id][0]), np.uint8) for one in asked]
    shown = [key_bytes(one.media) for one in asked]
    columns = {"tokens": Ragged.of(tokens), "loss_mask": Ragged.of(mask), "media": Ragged.of(shown)}
    return RowBatch(ids, columns)


async def test_the_trainer_gives_the_log_probs_that_were_sampled(folder, media, engine):
    asked = requests(media)
    said = await sampled(engine, asked)
    seeing = policy(folder)
    batch = PackedBatch(rows(asked, said))
    scored = seeing.score(batch)["log_probs"][batch.loss_mask]
    wanted = np.concatenate([said[one.id][1] for one in asked])
    np.testing.assert_allclose(scored.detach().numpy(), wanted, atol=1e-5)
    scored.sum().backward()
    assert float(seeing.model.model.visual.patch_embed.proj.weight.grad.abs().sum()) > 0
    assert not set(NEVER) & {token for tokens, _ in said.values() for token in tokens}


async def test_what_is_seen_matters(folder, media, engine):
    said = await sampled(engine, requests(media))
    seeing, asked = policy(folder), requests(media)
    given = rows(asked, said)
    keys = [(media[2].key,) if one.id[0] in "05" else one.media for one in asked]
    other = given.with_columns({"media": Ragged.of([key_bytes(own) for own in keys])})
    one, two = (PackedBatch(batch.take([0])) for batch in (given, other))
    assert not torch.allclose(seeing.score(one)["log_probs"], seeing.score(two)["log_probs"], atol=1e-4)


async def test_a_request_goes_on_where_another_left_it(media, engine):
    """As after a pause, an update or on another engine: with the same seed and tokens, the same sample."""
    asked = [replace(one, temperature=0.0) for one in requests(media)]
    whole = await sampled(engine, asked)
    begun = {one.id: whole[one.id][0][:4] for one in asked if len(whole[one.id][0]) > 4}
    rest = [
        replace(one, tokens=one.tokens + tuple(begun[one.id]), max_new_tokens=one.max_new_tokens - 4)
        for one in asked if one.id in begun
    ]  # fmt: skip
    again = await sampled(engine, rest)
    ended = {name: begun[name] + tokens for name, (tokens, _) in again.items()}
    assert rest and ended == {name: whole[name][0] for name in begun}


async def test_caches_are_computed_again_with_what_was_seen(media, engine):
    asked = [replace(one, temperature=0.0) for one in requests(media, new_tokens=30)]
    whole = await sampled(engine, asked)
    stream, out = engine.generate(asked), {one.id: [] for one in asked}
    dropped = False
    async for deltas in stream:
        for delta in deltas:
            out[delta.id] += delta.tokens
        if not dropped:
            dropped = True
            await engine.offload(("kv",))
            await engine.onload(("kv",))
    assert out == {name: tokens for name, (tokens, _) in whole.items()}


def test_placeholders_and_features_are_equally_many(folder, media):
    seeing = RowMedia(load_model(str(folder), "sdpa", torch.device("cpu")), str(folder / "media"))
    first = requests(media)[0]
    good = rows([first], {first.id: ([11, 2], [0.0, 0.0])})
    seeing.check(good)
    cases = {
        "4 image placeholders for 0 features": good.with_columns({"media": Ragged.of([key_bytes(())])}),
        "4 image placeholders for 16 features": good.with_columns({"media": Ragged.of([key_bytes((media[3].key,))])}),
        "4 image placeholders for 8 features": good.with_columns(
            {"media": Ragged.of([key_bytes((media[0].key,) * 2)])}
        ),
        "5 image placeholders for 4 features": rows(
            [replace(first, tokens=(*first.tokens, tiny.IMAGE))], {first.id: ([11], [0.0])}
        ),
        "trains token 6, a placeholder": rows([first], {first.id: ([tiny.IMAGE], [0.0])}),
    }
    for reason, batch in cases.items():
        with pytest.raises(ValueError, match=rf"row \(0, 0, 0, 0\): {reason}"):
            seeing.check(batch)


async def test_an_engine_refuses_what_does_not_fit_together(media, engine):
    first = requests(media)[0]
    for bad in (
        replace(first, tokens=(*first.tokens, tiny.IMAGE)),
        replace(first, media=()),
        replace(first, media=first.media * 2),
    ):
        with pytest.raises(ValueError, match="placeholders for"):
            engine.generate([bad])
