# SPDX-License-Identifier: Apache-2.0
"""Placeholders: one a medium as rendered, as many as it takes for the model, and nothing that only looks like one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from relax_plugin_chat.chat import ChatFamily

from relax_contrib.recipes import families as tiny
from relax_core.api import PlaceholderSpan, ProcessedMedia
from relax_core.api.family import Rendered
from relax_core.learn.huggingface import conserved
from relax_core.media.placeholders import MediaRefused, PlaceholderTokens, expand_placeholders
from tests.unit.sampling.toy_policy import Letters

IDS = {"image": 6, "video": 7}
FAMILY = Letters()
FAMILY.placeholders = IDS
TEXT = st.lists(st.integers(10, 99), max_size=5)
KEYS = st.text("0123456789abcdef", min_size=4, max_size=4)
MEDIA = st.lists(
    st.builds(
        lambda kind, key, count: PlaceholderTokens(kind, key, (PlaceholderSpan(kind, count),)),
        st.sampled_from(sorted(IDS)), KEYS, st.integers(1, 9),
    )
)  # fmt: skip


@given(media=MEDIA, data=st.data())
def test_tokens_stay_in_order_and_each_medium_gets_its_own(media, data):
    tokens, wanted = list(data.draw(TEXT)), []
    wanted += tokens
    for one in media:
        said = data.draw(TEXT)
        tokens += [IDS[one.kind], *said]
        wanted += [IDS[one.kind]] * one.layout[0].size + said
    got = expand_placeholders(Rendered(tuple(tokens), ("a",) * len(media)), media, FAMILY)
    assert got == Rendered(tuple(wanted), tuple(one.key for one in media))


@given(media=MEDIA, tokens=st.lists(st.integers(0, 12)))
def test_mismatched_placeholders_and_media_are_refused(media, tokens):
    kinds = [next(kind for kind, number in IDS.items() if number == token) for token in tokens if token in (6, 7)]
    if kinds == [one.kind for one in media]:
        assert len(expand_placeholders(Rendered(tuple(tokens)), media, FAMILY).media) == len(media)
    else:
        with pytest.raises(MediaRefused, match="placeholders of .* for media of"):
            expand_placeholders(Rendered(tuple(tokens)), media, FAMILY)


def test_a_kind_that_the_model_has_no_token_for():
    with pytest.raises(MediaRefused, match="no audio_token_id"):
        expand_placeholders(Rendered((6,)), [PlaceholderTokens("audio", "k", (PlaceholderSpan("audio", 3),))], FAMILY)


# -- models that read more than placeholders ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> ChatFamily:
    """Of a Qwen3-VL, which reads the time before the frames that it sees."""
    folder = tmp_path_factory.mktemp("timed")
    tiny.save_tokenizer(["<0.3", "<1.3", "seconds>"], folder)
    config = {
        "model_type": "qwen3_vl", "image_token_id": tiny.IMAGE, "video_token_id": tiny.VIDEO,
        "vision_start_token_id": tiny.VISION_START, "vision_end_token_id": tiny.VISION_END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    family = ChatFamily()
    family.open({"path": str(folder)})
    return family


def test_a_video_is_pictures_with_the_time_before_each(timed):
    start, end, video, image = tiny.VISION_START, tiny.VISION_END, tiny.VIDEO, tiny.IMAGE
    clip = PlaceholderTokens("video", "k", (PlaceholderSpan("video", 2, 0.26), PlaceholderSpan("video", 2, 1.3)))
    still = PlaceholderTokens("image", "i", (PlaceholderSpan("image", 3),))
    first, second = (timed.encode(f"<{at} seconds>") for at in ("0.3", "1.3"))
    assert tiny.UNK not in (*first, *second)
    frames = (*first, start, video, video, end, *second, start, video, video, end)
    got = expand_placeholders(Rendered((9, start, video, end, 8, start, image, end, 8)), [clip, still], timed)
    assert got == Rendered((9, *frames, 8, start, image, image, image, end, 8), ("k", "i"))
    assert expand_placeholders(Rendered((9, video, 8)), [clip], timed).tokens == (9, *frames, 8), (
        "a template without marks"
    )


def test_a_video_without_times_is_refused(timed):
    with pytest.raises(MediaRefused, match="without frame times"):
        expand_placeholders(
            Rendered((tiny.VIDEO,)), [PlaceholderTokens("video", "k", (PlaceholderSpan("video", 4),))], timed
        )


def test_parts_of_a_model_have_names(timed, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    assert set(timed.parts({"path": str(tmp_path)})) == {"vision", "projector", "language"}
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert timed.parts({"path": str(tmp_path)}) == {}


# -- placeholders and features ------------------------------------------------------------------------------------------


@given(media=MEDIA, data=st.data())
def test_inserted_placeholders_match_and_others_are_named(media, data):
    tokens = list(data.draw(TEXT))
    for one in media:
        tokens += [IDS[one.kind]] * one.layout[0].size + [10, *data.draw(TEXT)]
    stored = [ProcessedMedia(one.key, {}, one.layout[0].size, one.layout) for one in media]
    assert conserved(tokens, stored, IDS) == ""
    at = data.draw(st.integers(0, len(tokens)))
    extra = data.draw(st.sampled_from([6, 7]))
    assert f"{ {6: 'image', 7: 'video'}[extra] } placeholders" in conserved(
        [*tokens[:at], extra, *tokens[at:]], stored, IDS
    )


def test_media_that_run_into_each_other_or_are_cut_apart_are_named():
    one, other = (ProcessedMedia(key, {}, 2, (PlaceholderSpan("image", 2),)) for key in "ab")
    assert "in pieces of 4 image for media in pieces of 2 image, 2 image" in conserved([6, 6, 6, 6], [one, other], IDS)
    assert "in pieces of 1 image, 1 image for" in conserved([6, 9, 6], [one], IDS)


def test_a_layout_holds_all_features():
    whole = ProcessedMedia("a", {}, 3)
    assert whole.laid_out("audio").layout == (PlaceholderSpan("audio", 3),)
    for layout in ((PlaceholderSpan("audio", 2),), (PlaceholderSpan("audio", 3), PlaceholderSpan("audio", 0))):
        with pytest.raises(ValueError, match="for 3 features"):
            ProcessedMedia("a", {}, 3, layout).laid_out("audio")
