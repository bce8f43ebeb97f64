# SPDX-License-Identifier: Apache-2.0
"""What TensorBoard's own reader finds in the files."""

import io
import os
import signal
import subprocess
import sys
import wave
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from relax_plugin_tensorboard.sink import TensorBoard, TensorBoardOptions
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_core.testing.sink import SAMPLES, SinkSuite, metrics


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each tag as both of TensorBoard's readers find them: those of its API and of its pages."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    found = {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }
    assert {tag: shown(folder, tag) for tag in found} == {tag: [step for step, _ in found[tag]] for tag in found}
    return found


def shown(folder: Path, tag: str) -> list[int]:
    """Return the steps of a tag on TensorBoard's pages."""
    pages = plugin_event_accumulator.EventAccumulator(str(folder))
    pages.Reload()
    return [event.step for event in pages.Tensors(tag)]


def started(run_dir: Path) -> TensorBoard:
    sink = TensorBoard()
    sink.open(str(run_dir), "run", {})
    return sink


class TestTensorBoard(SinkSuite):
    component = "tensorboard"

    @classmethod
    def read_back(cls, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        found = scalars(run_dir / "tensorboard")
        for tag, points in found.items():
            assert len(points) == len(dict(points)), f"{tag} has a step twice"
        return {tag: dict(points) for tag, points in found.items()}


def test_a_rollback_hides_the_steps_that_it_undoes_at_once(tmp_path):
    sink = started(tmp_path)
    for step in (1, 2, 3):
        sink.samples(step, SAMPLES)
        sink.metrics(step, metrics(step))
    sink.rewind(1, 3)
    assert scalars(tmp_path / "tensorboard")["reward/mean"] == [(1, 0.125)]
    sink.samples(2, SAMPLES)
    sink.metrics(2, metrics(2, 1.0))
    sink.close()
    assert scalars(tmp_path / "tensorboard")["reward/mean"] == [(1, 0.125), (2, 1.25)]
    assert shown(tmp_path / "tensorboard", "transcripts") == [1, 2]


def test_a_resume_from_an_earlier_checkpoint_hides_later_steps_at_once_and_keeps_its_own_step(tmp_path):
    first = started(tmp_path)
    for step in (1, 2, 3, 4):
        first.metrics(step, metrics(step))
        first.metrics(step, {"eval/all/mean": step / 8})
    first.close()
    again = started(tmp_path)
    again.rewind(2, 4)
    for tag in ("reward/mean", "eval/all/mean"):
        assert scalars(tmp_path / "tensorboard")[tag] == [(1, 0.125), (2, 0.25)]
    again.metrics(2, {"eval/all/mean": 0.5})  # a resumed run may evaluate its step again
    again.metrics(3, metrics(3, 1.0))
    again.metrics(3, {"eval/all/mean": 0.75})
    again.close()
    found = scalars(tmp_path / "tensorboard")
    assert found["reward/mean"] == [(1, 0.125), (2, 0.25), (3, 1.375)]
    assert found["eval/all/mean"] == [(1, 0.125), (2, 0.25), (3, 0.75)]


def test_transcripts_are_texts(tmp_path):
    sink = started(tmp_path)
    sink.samples(1, SAMPLES)
    sink.close()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    (event,) = accumulator.Tensors("transcripts")
    texts = [text.decode() for text in event.tensor_proto.string_val]
    assert event.step == 1 and "user\n\n    What is <b>2 + 2</b>?\n\nassistant\n\n    4" in texts[0]
    assert "user\n\n    [image] π?" in texts[1] and texts[1].count("3.1") == 1
    assert accumulator.summary_metadata["transcripts"].plugin_data.plugin_name == "text"


def picture(color):
    out = io.BytesIO()
    Image.new("RGB", (4, 3), color).save(out, "PNG")
    return out.getvalue()


def sound():
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(160))
    return out.getvalue()


def test_images_and_sounds_of_transcripts_are_shown_and_videos_are_left_out(tmp_path):
    files = {"a.image": picture("red"), "b.image": picture("blue"), "c.audio": sound(), "d.video": b"\x1a\x45\xdf\xa3.",
             "e.audio": b"ID3."}  # fmt: skip
    (tmp_path / "media" / "previews").mkdir(parents=True)
    for name, data in files.items():
        (tmp_path / "media" / "previews" / name).write_bytes(data)
    parts = [{"type": name.split(".")[1], "key": name.split(".")[0]} for name in ("d.video", "a.image", "e.audio")]
    more = [{"type": "image", "key": "b"}, {"type": "audio", "key": "c"}]
    sink = started(tmp_path)
    sink.samples(1, [{"task_id": "t-1", "prompt": [{"role": "user", "content": parts}], "response": "x"}])
    sink.samples(1, [{"task_id": "t-2", "prompt": [{"role": "user", "content": more}], "response": "x"}])
    sink.close()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    pages = {tag: found.plugin_data.plugin_name for tag, found in accumulator.summary_metadata.items()}
    assert pages == {"transcripts": "text", "media/images": "images", "media/sounds": "audio"}
    images = [list(event.tensor_proto.string_val) for event in accumulator.Tensors("media/images")]
    assert images == [[b"4", b"3", files["a.image"]], [b"4", b"3", files["b.image"]]]
    (event,) = accumulator.Tensors("media/sounds")
    assert list(event.tensor_proto.string_val) == [files["c.audio"], b"t-2"] and event.step == 1
    assert [size.size for size in event.tensor_proto.tensor_shape.dim] == [1, 2]


def test_media_can_be_left_out(tmp_path):
    (tmp_path / "media" / "previews").mkdir(parents=True)
    (tmp_path / "media" / "previews" / "k.image").write_bytes(picture("red"))
    for folder, options in (("none", {"max_media": 0}), ("no-text", {"transcripts": False}), ("all", {})):
        sink = TensorBoard(TensorBoardOptions(directory=folder, **options))
        sink.open(str(tmp_path), "run", {})
        sink.samples(1, SAMPLES)
        sink.close()
        accumulator = EventAccumulator(str(tmp_path / folder))
        accumulator.Reload()
        assert ("media/images" in accumulator.Tags()["tensors"]) == (folder == "all")


def test_transcripts_can_be_left_out(tmp_path):
    sink = TensorBoard(TensorBoardOptions(transcripts=False, directory="elsewhere"))
    sink.open(str(tmp_path), "run", {})
    sink.samples(1, SAMPLES)
    sink.metrics(1, metrics(1))
    sink.close()
    accumulator = EventAccumulator(str(tmp_path / "elsewhere"))
    accumulator.Reload()
    assert accumulator.Tags()["tensors"] == []


def test_an_evaluation_at_the_resumed_step_keeps_that_step(tmp_path):
    first = started(tmp_path)
    for step in (1, 2, 3):
        first.metrics(step, metrics(step))
    first.metrics(2, {"eval/a/mean": 0.25})
    first.close()
    second = started(tmp_path)
    second.metrics(2, {"eval/a/mean": 0.75})
    second.metrics(3, metrics(3, offset=1.0))
    second.close()
    found = scalars(tmp_path / "tensorboard")
    assert found["eval/a/mean"] == [(2, 0.25)]
    assert found["reward/mean"] == [(1, 0.125), (2, 0.25), (3, 1.375)]


def test_transcripts_ahead_of_the_resumed_step_do_not_hide_it(tmp_path):
    first = started(tmp_path)
    for step in (1, 2, 3):
        first.metrics(step, metrics(step))
    first.close()
    second = started(tmp_path)
    second.samples(4, SAMPLES)
    second.metrics(2, metrics(2, offset=1.0))
    second.close()
    assert scalars(tmp_path / "tensorboard")["reward/mean"] == [(1, 0.125), (2, 1.25)]


def test_a_killed_writer_leaves_its_finished_steps_and_can_continue(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from relax_plugin_tensorboard.sink import TensorBoard\n"
        "sink = TensorBoard(); sink.open(sys.argv[1], 'run', {})\n"
        "for step in (1, 2, 3): sink.metrics(step, {'reward/mean': step / 8})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[:-5])
    sink = started(tmp_path)
    sink.metrics(3, metrics(3))
    sink.close()
    assert scalars(tmp_path / "tensorboard")["reward/mean"] == [(1, 0.125), (2, 0.25), (3, 0.375)]


def test_torch_is_not_needed(tmp_path):
    script = (
        "import sys\nsys.modules['torch'] = None\nsys.modules['tensorflow'] = None\n"
        "from relax_plugin_tensorboard.sink import TensorBoard\n"
        "sink = TensorBoard(); sink.open(sys.argv[1], 'run', {}); sink.metrics(1, {'a/b': 1.0}); sink.close()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert scalars(tmp_path / "tensorboard") == {"a/b": [(1, 1.0)]}
