# SPDX-License-Identifier: Apache-2.0
"""Models of every family that sees or hears: the engine samples, the trainer scores, and transformers alone agrees.

One batch of each model mixes all that it takes: rows of text, pictures, videos and sounds, alone and together.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.api import (
    ConfigError,
    EngineSpec,
    GenerateRequest,
    Media,
    Message,
    ProcessedMedia,
    Ragged,
    RowBatch,
    RowId,
)
from relax_core.api.task import MediaKind, Part
from relax_core.learn.huggingface import INPUTS
from relax_core.media.store import MediaStore, key_bytes, tensors_of
from tests.unit.media import clips

torch = pytest.importorskip("torch")

from relax_plugin_chat.chat import ChatFamily  # noqa: E402
from relax_plugin_omni.audio import AudioProcessor  # noqa: E402
from relax_plugin_omni.image import ImageOptions, ImageProcessor  # noqa: E402
from relax_plugin_omni.video import VideoOptions, VideoProcessor  # noqa: E402
from relax_plugin_torch.model import load_model  # noqa: E402
from relax_plugin_torch.policy import Policy  # noqa: E402
from relax_plugin_transformers.engine import TransformersEngine  # noqa: E402

from relax_contrib.recipes import families as tiny  # noqa: E402
from relax_core.learn import PackedBatch  # noqa: E402
from relax_core.media.placeholders import PlaceholderTokens, expand_placeholders  # noqa: E402
from relax_core.trainer_kit.row_media import RowMedia  # noqa: E402

CPU = torch.device("cpu")
WORDS = ("what", "is", "this", "?", "seconds>", *(f"<{tenth / 10:.1f}" for tenth in range(20)))
KINDS: dict[str, MediaKind] = {"image": "image", "wide": "image", "sound": "audio", "tone": "audio"}
EYES = ([], ["image"], ["video"], ["image", "video"], ["video", "long", "image"], ["image", "wide"])
EARS = (
    [], ["image"], ["sound"], ["tone", "sound"], ["image", "sound"], ["video"], ["sound", "long", "wide", "tone"],
    ["clip"], ["image", "clip", "tone"], ["video", "clip"],
)  # fmt: skip
SHOWS = {model_type: EARS if "omni" in model_type else EYES for model_type in tiny.MODEL_TYPES}


@dataclass(frozen=True)
class Model:
    """A folder, its store of media by name, and its chat family."""

    folder: Path
    media: dict[str, ProcessedMedia]
    shows: tuple[list[str], ...]
    family: ChatFamily

    def message(self, names: list[str]) -> Message:
        media = [Part(media=Media(KINDS.get(name, "video"), name)) for name in names]
        return Message("user", (*media, Part("what is this ?")))

    def held(self, names: list[str]) -> list[PlaceholderTokens]:
        return [
            PlaceholderTokens(KINDS.get(name, "video"), self.media[name].key, self.media[name].layout) for name in names
        ]

    def prompt(self, names: list[str]) -> tuple[int, ...]:
        return expand_placeholders(self.family.start((self.message(names),)), self.held(names), self.family).tokens

    @property
    def atol(self) -> float:
        """Transformers' own linear attention gives that much else step by step than all at once, in float32."""
        return 5e-4 if "qwen3_5" in self.folder.parent.name else 2e-5

    def requests(self) -> list[GenerateRequest]:
        """Two samples of each, of several lengths."""
        return [
            GenerateRequest(
                f"{number}-{sample}", self.prompt(names), 4 + 3 * (number % 3), seed=10 * number + sample,
                suppress_tokens=tiny.NEVER, media=tuple(self.media[name].key for name in names),
            )
            for number, names in enumerate(self.shows) for sample in range(2)
        ]  # fmt: skip

    def engine_spec(self) -> EngineSpec:
        return EngineSpec({"path": str(self.folder), "dtype": "float32"}, 512, media=str(self.folder / "media"))

    def policy(self) -> Policy:
        model = load_model(str(self.folder), "sdpa", CPU)
        row_media = RowMedia(model, str(self.folder / "media"))
        return Policy(
            model, temperature=1.0, autocast=None, max_logits=1 << 20, share_prefixes=True, row_media=row_media,
            suppress=tiny.NEVER,
        )  # fmt: skip


@pytest.fixture(scope="module", params=tiny.MODEL_TYPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return built(request.param, tmp_path_factory.mktemp(request.param) / "model")


def built(model_type: str, folder: Path, gate_std: float = 0.0, **text: Any) -> Model:
    """Make a model; `gate_std`: spread of its routers' weights, 0 for the library's own. `text`: of its decoder."""
    tiny.save_tokenizer(WORDS, folder)
    made = tiny.build_model(model_type, 3, 64, initializer_range=0.1, **text)
    for name, parameter in made.named_parameters():
        if gate_std and name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=gate_std)
    made.save_pretrained(folder)
    family = ChatFamily()
    family.open({"path": str(folder)})
    return Model(folder, stored(folder, "omni" in model_type), SHOWS[model_type], family)


def stored(folder: Path, hears: bool) -> dict[str, ProcessedMedia]:
    table = {"path": str(folder)}
    image = ImageProcessor(ImageOptions(max_tokens=4))
    wide = ImageProcessor(ImageOptions(min_tokens=12, max_tokens=16))
    video = VideoProcessor(VideoOptions(fps=2, max_tokens_per_frame=4))
    media = {
        "image": image.process(Media("image", ""), clips.picture(1), table),
        "wide": wide.process(Media("image", ""), clips.picture(2, 64), table),
        "video": video.process(Media("video", ""), clips.video(3, 8), table),
        "long": video.process(Media("video", ""), clips.video(4, 14, 48), table),
    }
    if hears:
        both = VideoProcessor(VideoOptions(fps=3, max_tokens_per_frame=4, sound=True))
        media["clip"] = both.process(Media("video", ""), clips.video(7, 8, tone_hz=700.0), table)
        media |= {
            name: AudioProcessor().process(Media("audio", ""), clips.sound(seed, seconds), table)
            for name, seed, seconds in (("sound", 5, 0.31), ("tone", 6, 1.27))
        }
    for one in media.values():
        MediaStore(folder / "media").put(one)
    return media


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
async def engine(model: Model):
    started = TransformersEngine()
    await started.start(model.engine_spec())
    yield started
    await started.stop()


def rows(asked: list[GenerateRequest], said: dict[str, tuple[list[int], list[float]]]) -> RowBatch:
    ids = tuple(RowId(int(one.id[0]), int(one.id[2]), 0, 0) for one in asked)
    tokens = [np.array([*one.tokens, *said[one.id][0]], np.int32) for one in asked]
    mask = [np.array([0] * len(one.tokens) + [1] * len(said[one.id][0]), np.uint8) for one in asked]
    shown = [key_bytes(one.media) for one in asked]
    return RowBatch(ids, {"tokens": Ragged.of(tokens), "loss_mask": Ragged.of(mask), "media": Ragged.of(shown)})


def graded(batch: RowBatch) -> RowBatch:
    """Odd tokens were a good idea."""
    tokens = batch.columns["tokens"]
    values = np.where(tokens.values % 2, 1.0, -1.0).astype(np.float32)
    versions = np.where(batch.columns["loss_mask"].values == 1, 0, -1).astype(np.int32)
    return batch.with_columns(
        {"advantages": Ragged(values, tokens.lengths), "weight_versions": Ragged(versions, tokens.lengths)}
    )


async def test_engine_trainer_and_transformers_give_the_same_log_probs(model, engine):
    asked = model.requests()
    first, second = await asyncio.gather(sampled(engine, asked[::2]), sampled(engine, asked[1::2]))
    said = first | second
    policy, together = model.policy(), rows(asked, said)
    policy._row_media.check(together)
    batch = PackedBatch(together)
    with torch.no_grad():
        scored = policy.score(batch)["log_probs"][batch.loss_mask].numpy()
        alone = [plain(policy.model, model, one, said[one.id][0]) for one in asked]
        singly = [PackedBatch(together.take([row])) for row in range(len(asked))]
        apart = np.concatenate([policy.score(one)["log_probs"][one.loss_mask].numpy() for one in singly])
    for own, its in zip(np.split(scored, np.cumsum([len(said[one.id][0]) for one in asked])[:-1]), alone, strict=True):
        if its is not None:
            np.testing.assert_allclose(own, its, atol=model.atol)
    np.testing.assert_allclose(scored, apart, atol=model.atol)
    np.testing.assert_allclose(np.concatenate([said[one.id][1] for one in asked]), scored, atol=model.atol)
    assert not set(tiny.NEVER) & {token for tokens, _ in said.values() for token in tokens}


def plain(module: Any, model: Model, request: GenerateRequest, tokens: list[int]) -> np.ndarray | None:
    """What transformers makes of one row, positions and all; None where it can't: of videos with and without their sound."""
    store, ids = MediaStore(model.folder / "media"), torch.tensor([[*request.tokens, *tokens]])
    media = [store.get(key) for key in request.media]
    shown = tensors_of(media)
    clips_of = [len({span.kind for span in one.layout}) for one in media if len(one.layout) > 1]
    if set(clips_of) == {1, 2}:
        return None
    inputs = {name: torch.from_numpy(np.array(value)) for name, value in shown.items() if name in INPUTS}
    if "thinker" not in module.config.model_type:
        inputs.pop("video_second_per_grid", None)
        inputs["mm_token_type_ids"] = (ids == tiny.IMAGE).long() + 2 * (ids == tiny.VIDEO)
    elif 2 in clips_of:
        inputs["use_audio_in_video"] = True
    logits = module(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0, -len(tokens) - 1 : -1]
    logits[:, list(tiny.NEVER)] = -1e9
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


async def test_a_request_continues_where_another_left_it_and_caches_come_again(model, engine):
    """As after a pause, an update or on another engine: with the same tokens, the same sample."""
    asked = [replace(one, temperature=0.0, max_new_tokens=10) for one in model.requests()[::2]]
    whole = await sampled(engine, asked)
    rest = [replace(one, tokens=(*one.tokens, *whole[one.id][0][:4]), max_new_tokens=6) for one in asked]
    again = await sampled(engine, rest)
    assert {name: tokens for name, (tokens, _) in again.items()} == {
        name: said[4:] for name, (said, _) in whole.items()
    }
    out: dict[str, list[int]] = {one.id: [] for one in asked}
    dropped = False
    async for deltas in engine.generate(asked):
        for delta in deltas:
            out[delta.id] += delta.tokens
        if not dropped:
            dropped = True
            await engine.offload(("kv",))
            await engine.onload(("kv",))
    assert out == {name: tokens for name, (tokens, _) in whole.items()}


def test_marks_that_a_policy_wrote_are_text(model):
    """What opens a medium means nothing before a word, and positions go on as before any word."""
    policy, names = model.policy(), model.shows[-1]
    prompt, keys = model.prompt(names), tuple(model.media[name].key for name in names)
    asked = GenerateRequest("0-0", (*prompt, 11, 12, 11), 9, media=keys)
    marks = [tiny.VISION_START, tiny.AUDIO_START, tiny.VISION_END, tiny.VISION_START]
    batch = PackedBatch(rows([asked], {"0-0": (marks, [0.0] * 4)}))
    ids = batch.tokens[None, :-1]
    positions = policy._row_media.inputs(batch, ids).get("position_ids")
    assert torch.isfinite(policy.score(batch)["log_probs"]).all()
    assert positions is not None and torch.allclose(positions[0, 0, -6:].diff(), torch.ones(5, dtype=positions.dtype))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return built("qwen3_vl", tmp_path_factory.mktemp("seeing") / "model")


def test_placeholders_and_features_are_equally_many(seeing: Model) -> None:
    image, wide = (seeing.media[name] for name in ("image", "wide"))
    row_media = seeing.policy()._row_media
    (first, *_) = (one for one in seeing.requests() if one.media == (image.key,))

    def row(*keys: str, said: int = 11, **changes: Any) -> RowBatch:
        asked = replace(first, id="0-0", media=keys, **changes)
        return rows([asked], {"0-0": ([said, 2], [0.0, 0.0])})

    row_media.check(row(image.key))
    cases = {
        "4 image placeholders for 0 features": row(),
        "4 image placeholders for 16 features": row(wide.key),
        "4 image placeholders for 8 features": row(image.key, image.key),
        "5 image placeholders for 4 features": row(image.key, tokens=(*first.tokens, tiny.IMAGE)),
        "trains token 6, a placeholder": row(image.key, said=tiny.IMAGE),
    }
    for reason, batch in cases.items():
        with pytest.raises(ValueError, match=rf"row \(0, 0, 0, 0\): {reason}"):
            row_media.check(batch)


async def test_an_engine_refuses_what_does_not_fit_together(seeing: Model) -> None:
    engine = TransformersEngine()
    await engine.start(seeing.engine_spec())
    (first, *_) = (one for one in seeing.requests() if len(one.media) == 1)
    try:
        for bad in ({"tokens": (*first.tokens, tiny.IMAGE)}, {"media": ()}, {"media": first.media * 2}):
            with pytest.raises(ValueError, match="placeholders for"):
                engine.generate([replace(first, **bad)])
    finally:
        await engine.stop()


def test_a_whole_omni_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {}}}')
    with pytest.raises(ConfigError, match=r"talker in addition to the thinker; save `\.thinker`"):
        load_model(str(tmp_path), "sdpa", CPU)


async def test_media_that_come_with_a_later_turn(model, engine):
    """The policy speaks, is shown something more, and speaks again: both turns are scored as they were sampled."""
    first = [replace(one, max_new_tokens=4) for one in model.requests()[::2]]
    said = await sampled(engine, first)
    later = [model.shows[(number + 1) % len(model.shows)] for number in range(len(first))]
    asked, spoken = [], {}
    for one, names in zip(first, later, strict=True):
        tokens = said[one.id][0]
        added = model.family.delta(
            (Message("user", "x"), Message("assistant", "y")), (model.message(names),), tokens[-1]
        )
        more = expand_placeholders(added, model.held(names), model.family).tokens
        keys = (*one.media, *(model.media[name].key for name in names))
        asked.append(replace(one, tokens=(*one.tokens, *tokens, *more), media=keys, max_new_tokens=5))
        spoken[one.id] = (len(one.tokens), len(tokens))
    again = await sampled(engine, asked)
    together, policy = rows(asked, again), model.policy()
    masks = [mask.copy() for mask in together.columns["loss_mask"].rows()]
    for mask, one in zip(masks, first, strict=True):
        begin, length = spoken[one.id]
        mask[begin : begin + length] = 1
    batch = PackedBatch(together.with_columns({"loss_mask": Ragged.of(masks)}))
    policy._row_media.check(batch.rows)
    with torch.no_grad():
        scored = policy.score(batch)["log_probs"][batch.loss_mask].numpy()
    wanted = np.concatenate([[*said[one.id][1], *again[one.id][1]] for one in first])
    np.testing.assert_allclose(scored, wanted, atol=model.atol)
