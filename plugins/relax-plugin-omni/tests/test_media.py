# SPDX-License-Identifier: Apache-2.0
"""Results of processors for real media, held against transformers' own, and of hostile ones."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from relax_plugin_omni.audio import AudioOptions, AudioProcessor, samples
from relax_plugin_omni.image import ImageOptions, ImageProcessor
from relax_plugin_omni.video import VideoOptions, VideoProcessor
from relax_plugin_omni.video_with_sound import join_sound

from relax_core.api import ConfigError, Media, PlaceholderSpan, ProcessedMedia
from relax_core.media.source import content_key, read_source
from tests.unit.media import clips

PROCESSORS: dict[str, Any] = {"image": ImageProcessor, "audio": AudioProcessor, "video": VideoProcessor}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return clips.model(tmp_path_factory.mktemp("model"))


def process(kind: str, data: bytes, model: dict[str, str], **options: Any) -> ProcessedMedia:
    """As it was budgeted."""
    processor = PROCESSORS[kind](PROCESSORS[kind].options_model()(**options))
    done = processor.process(Media(kind, ""), data, model)
    assert processor.budget(Media(kind, clips.uri(data)), model) == done.num_placeholders
    return done


def video(frames: int = 16, side: int = 64, fps: int = 8, **how: Any) -> bytes:
    return clips.video(0, frames, side, fps, **how)


# -- images ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(40, 40), (200, 33), (7, 100), (300, 210)])
def test_an_image_is_what_transformers_makes_of_it(model, width, height):
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    data = clips.picture(0, width, height)
    theirs = Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, size={"shortest_edge": 4 * 256, "longest_edge": 64 * 256}, image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )(images=[Image.open(io.BytesIO(data))], return_tensors="np")  # fmt: skip
    ours = process("image", data, model, max_tokens=64)
    np.testing.assert_array_equal(ours.tensors["image_grid_thw"], theirs["image_grid_thw"])
    np.testing.assert_array_equal(ours.tensors["pixel_values"], theirs["pixel_values"])


@pytest.mark.parametrize(
    ("form", "mode"), [("PNG", "RGB"), ("PNG", "L"), ("JPEG", "RGB"), ("WEBP", "RGB"), ("GIF", "L"), ("BMP", "RGB")]
)
def test_formats_and_modes(model, form, mode):
    assert process("image", clips.picture(0, 50, 30, form, mode), model).num_placeholders == 6


def test_a_turned_photograph_is_turned_back_and_budgeted_so(model):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    turned = process("image", clips.picture(0, 128, 32, "JPEG", exif=exif), model)
    assert turned.tensors["image_grid_thw"].tolist() == [[1, 16, 4]]


@given(width=st.integers(1, 600), height=st.integers(1, 600), least=st.integers(1, 64), more=st.integers(0, 256))
@settings(max_examples=30)
def test_an_image_takes_tokens_within_the_bounds(model, width, height, least, more):
    if max(width, height) > 200 * min(width, height):
        return
    most = 4 * least + more + 4
    tokens = process(
        "image", clips.picture(0, width, height), model, min_tokens=least, max_tokens=most
    ).num_placeholders
    thin = max(width, height) / min(width, height)
    assert tokens <= max(most, thin) and tokens >= 1


def test_an_image_bomb_is_refused_by_its_header(model):
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    body = zlib.compress(bytes(1000))
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    bomb += struct.pack(">I", len(body)) + b"IDAT" + body + struct.pack(">I", zlib.crc32(b"IDAT" + body))
    with pytest.raises(ValueError, match=r"60000|pixels"):
        process("image", bomb, model)


def test_a_thin_image_and_an_empty_one_are_refused(model):
    with pytest.raises(ValueError, match="200 times"):
        process("image", clips.picture(0, 401, 2), model)
    with pytest.raises(ValueError, match="no bytes"):
        ImageProcessor().process(Media("image", ""), b"", model)


def test_a_truncated_image_is_refused(model):
    data = clips.picture(0, 100, 100, "JPEG")
    with pytest.raises(ValueError, match="truncated"):
        ImageProcessor().process(Media("image", ""), data[: len(data) // 2], model)


# -- sound ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.05, 0.74, 3.2])
def test_sound_is_what_transformers_makes_of_it(model, seconds):
    from transformers import WhisperFeatureExtractor

    data = clips.sound(0, seconds)
    theirs = WhisperFeatureExtractor(feature_size=32)._np_extract_fbank_features(samples(data, 10.0)[None], "cpu")
    np.testing.assert_allclose(process("audio", data, model).tensors["input_features"], theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("rate", "channels", "form"),
    [(8_000, 1, "WAV"), (44_100, 2, "FLAC"), (22_050, 1, "OGG"), (24_000, 2, "MP3"), (11_127, 3, "WAV"), (192_000, 1, "WAV")],
)  # fmt: skip
def test_odd_rates_and_channels_take_as_long_as_they_last(model, rate, channels, form):
    assert process("audio", clips.sound(0, 1.3, rate, channels, form), model).tensors["input_features"].shape == (
        1,
        32,
        130,
    )


def test_the_sound_of_a_video_is_sound(model):
    assert process("audio", video(tone_hz=440.0), model).num_placeholders in range(25, 29)


def test_too_long_too_short_and_silent_files(model):
    with pytest.raises(ValueError, match=r"3\.0 s; at most 2 s"):
        process("audio", clips.sound(0, 3.0), model, max_seconds=2)
    with pytest.raises(ValueError, match="too short"):
        process("audio", clips.sound(0, 0.001), model)
    with pytest.raises(ValueError, match="without audio"):
        process("audio", video(), model)
    assert np.isfinite(process("audio", clips.sound(0, 0.5), model).tensors["input_features"]).all()


def test_a_view_of_sound_shares_its_features(model):
    whole = process("audio", clips.sound(0, 2.0), model)
    part = AudioProcessor().view(whole, 0.5, 1.5)
    np.testing.assert_array_equal(part.tensors["input_features"], whole.tensors["input_features"][:, :, 50:150])
    assert part.num_placeholders == 13
    with pytest.raises(ValueError, match="none of the sound"):
        AudioProcessor().view(whole, 5.0, 6.0)


# -- video ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx"), ("matroska", "mpeg4"), ("avi", "mpeg4")]
)
def test_containers(model, form, codec):
    assert process("video", video(form=form, codec=codec), model).num_placeholders == 32


@pytest.mark.parametrize(("options", "frames"), [
    ({"fps": 4}, 8), ({"fps": 1, "min_frames": 2}, 2), ({"fps": 30}, 60), ({"fps": 30, "max_frames": 10}, 10),
    ({"fps": 0.1, "min_frames": 1}, 2),
])  # fmt: skip
def test_frames_are_taken_at_even_distances_within_the_bounds(model, options, frames):
    done = process("video", video(), model, **options)
    seconds = done.tensors["frame_seconds"]
    assert len(seconds) == frames and done.tensors["video_grid_thw"][0, 0] == frames // 2
    np.testing.assert_allclose(np.diff(seconds), 2.0 / frames)


@pytest.mark.parametrize(
    ("options", "tokens"), [({}, 16), ({"max_tokens_per_frame": 4}, 4), ({"min_tokens_per_frame": 64}, 64)]
)
def test_frames_have_tokens_within_the_bounds(model, options, tokens):
    assert process("video", video(), model, **options).num_placeholders == 2 * tokens


def test_frames_show_what_was_there_at_their_time(model):
    """The square has moved to the right from frame to frame."""
    done = process("video", video(), model, fps=4)
    (t, h, w), values = done.tensors["video_grid_thw"][0], done.tensors["pixel_values_videos"]
    bright = values.reshape(t, h // 2, w // 2, 2, 2, 3, 2, 8, 8)[:, 1].mean(axis=(2, 3, 4, 5, 6, 7))
    assert np.all(np.diff(bright.argmax(axis=1)) >= 0) and bright.argmax(axis=1)[-1] > bright.argmax(axis=1)[0]


def test_a_view_of_a_video_shares_its_frames(model):
    whole = process("video", video(frames=40), model)
    part = VideoProcessor().view(whole, 1.0, 3.0)
    assert part.tensors["frame_seconds"].tolist() == [1.25, 1.75, 2.25, 2.75] and part.num_placeholders == 32


def test_bounds_of_a_video(model):
    with pytest.raises(ValueError, match="at most 1 s"):
        process("video", video(), model, max_seconds=1)
    with pytest.raises(ValueError, match="megapixels"):
        process("video", video(), model, max_megapixels=0.001)
    with pytest.raises(ValueError, match="without video"):
        process("video", clips.sound(0, form="OGG"), model)


def test_a_playlist_opens_no_other_file(model, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(video())
    for text in (f"#EXTM3U\n#EXTINF:2,\n{tmp_path}/clip.mp4\n", f"ffconcat version 1.0\nfile {tmp_path}/clip.mp4\n"):
        with pytest.raises(ValueError, match="can't be decoded"):
            process("video", text.encode(), model)


# -- all ------------------------------------------------------------------------------------------------------------

REAL = {
    "image": [clips.picture(0, form=form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP")],
    "audio": [clips.sound(0, 0.2, form=form) for form in ("WAV", "FLAC", "OGG", "MP3")],
    "video": [video(8, 32), video(8, 32, form="matroska")],
}
LIMITS: dict[str, dict[str, Any]] = {
    "image": {"max_megapixels": 4.0, "max_tokens": 256}, "audio": {"max_seconds": 20.0},
    "video": {"max_seconds": 20.0, "max_megapixels": 4.0, "max_frames": 32},
}  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, kind: str) -> bytes:
    data = bytearray(draw(st.sampled_from(REAL[kind])))
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(["flip", "cut", "insert", "copy"]))
        if how == "flip" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del data[at : at + draw(st.integers(1, len(data) + 1))]
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        else:
            data[at:at] = data[: draw(st.integers(0, 64))]
    return bytes(data)


@pytest.mark.parametrize("kind", sorted(PROCESSORS))
def test_damaged_files_are_read_within_the_limits_or_refused_with_a_reason(kind, model):
    processor = PROCESSORS[kind](PROCESSORS[kind].options_model()(**LIMITS[kind]))

    @given(data=damaged(kind))
    @settings(max_examples=80, derandomize=True)  # a decoder's own crash must not come by chance
    def check(data: bytes) -> None:
        try:
            done = processor.process(Media(kind, ""), data, model)
        except ValueError as refused:
            assert str(refused)
            return
        assert all(np.isfinite(tensor).all() for tensor in done.tensors.values())
        assert processor.budget(Media(kind, clips.uri(data)), model) == done.num_placeholders <= 16 * 256

    check()


@pytest.mark.parametrize("kind", sorted(PROCESSORS))
@given(data=st.binary(max_size=300))
@settings(max_examples=20)
def test_noise_is_refused(kind, model, data):
    with pytest.raises(ValueError):
        PROCESSORS[kind]().process(Media(kind, ""), data, model)


@pytest.mark.parametrize("kind", sorted(PROCESSORS))
def test_a_model_without_the_tower_is_named(kind, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match=r"model\.path: got .* has no (vision|audio)_config"):
        PROCESSORS[kind]().process(Media(kind, ""), REAL[kind][0], {"path": str(tmp_path)})


def test_keys_differ_with_bytes_and_knobs(model):
    one, other = clips.picture(0), clips.picture(1)
    keys = [process("image", one, model).key, process("image", other, model).key]
    keys.append(process("image", one, model, max_tokens=9).key)
    assert len(set(keys)) == 3 and keys[0] == process("image", one, model).key


@pytest.mark.parametrize(("model_options", "message"), [
    ((ImageOptions, {"min_tokens": 5, "max_tokens": 4}), "min_tokens 5 is above max_tokens 4"),
    ((VideoOptions, {"min_frames": 9, "max_frames": 4}), "min_frames 9 is above max_frames 4"),
    ((AudioOptions, {"max_seconds": 0}), "greater than 0"),
])  # fmt: skip
def test_knobs_that_contradict_each_other(model_options, message):
    kind, options = model_options
    with pytest.raises(ValueError, match=message):
        kind(**options)


# -- sources --------------------------------------------------------------------------------------------------------


def test_sources(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    path = str(tmp_path / "a.bin")
    for source in (path, f"file://{path}", "data:;base64,YWJj", "data:,abc", clips.uri(b"abc")):
        assert read_source(source) == b"abc"


def test_bad_sources_say_what_is_wrong(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "large").write_bytes(bytes(100))
    cases = {
        str(tmp_path / "none"): "No such file", str(tmp_path / "pipe"): "not a regular file", str(tmp_path): "not a reg",
        "/dev/zero": "not a regular file", str(tmp_path / "empty"): "no bytes", str(tmp_path / "large"): "more than 50 bytes",
        "data:image/png;base64": "without a comma", "data:;base64,%%": "base64 is broken", "ftp://host/x": "give a path",
        "http://127.0.0.1:9/x.png": "host is not allowed",
    }  # fmt: skip
    for source, reason in cases.items():
        with pytest.raises(ValueError, match=reason):
            read_source(source, 50)


def test_content_keys() -> None:
    assert content_key(b"a", 1) == content_key(b"a", 1) != content_key(b"a", 2)
    assert len(bytes.fromhex(content_key(b""))) == 16


@pytest.mark.parametrize(
    ("grids", "grid_s", "tokens", "rate"), [(3, 1.0, 40, 13.0), (4, 0.37, 7, 13.0), (2, 2.0, 130, 25.0)]
)
def test_sound_is_placed_between_frames_as_in_transformers(grids, grid_s, tokens, rate):
    from types import SimpleNamespace

    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

    tokens_of = {"video_token": "v", "audio_token": "a", "audio_bos_token": "", "audio_eos_token": ""}
    processor = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), **tokens_of)
    seen = {"video_grid_thw": np.array([[grids, 4, 6]]), "video_second_per_grid": [grid_s]}
    theirs = Qwen3OmniMoeProcessor.replace_video_with_audio_token(
        processor, seen, 0, {"num_audio_tokens": [tokens]}, 0, position_id_per_seconds=rate
    )
    frames = tuple(PlaceholderSpan("video", 6, float(at)) for at in range(grids))
    video = ProcessedMedia("ab", {"video_second_per_grid": np.array([grid_s], np.float32)}, 6 * grids, frames)
    ours = join_sound(video, ProcessedMedia("cd", {}, tokens), rate)
    assert "".join(span.kind[0] * span.size for span in ours.layout) == theirs and ours.laid_out("video") == ours


def test_a_video_with_its_sound_and_one_that_has_none(model):
    both = process("video", video(tone_hz=440.0), model, sound=True)
    assert {span.kind for span in both.layout} == {"video", "audio"} and "input_features" in both.tensors
    assert both.num_placeholders > process("video", video(tone_hz=440.0), model).num_placeholders
    silent = process("video", video(), model, sound=True)
    assert {span.kind for span in silent.layout} == {"video"}
    with pytest.raises(ValueError, match="leave the option sound out"):
        VideoProcessor().view(both, 0.0, 1.0)
