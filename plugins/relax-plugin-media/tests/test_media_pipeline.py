# SPDX-License-Identifier: Apache-2.0
"""Media of a rollout in real child processes: each is processed once, and what breaks a process is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax_plugin_media.pipeline import ATTEMPTS, BACKOFF_S, HOLD_OFF_S, RESTORE_POLL_S, ProcessedOncePipeline

from relax_core.api import Chosen, Media, Message, Rendered
from relax_core.api.errors import DiskFull, InfrastructureError
from relax_core.api.task import Part
from relax_core.media.access import SourceAccess
from relax_core.media.placeholders import MediaRefused
from relax_core.media.store import MediaStore
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.session import Branch, Limits, Sample
from tests.unit.media.test_media_store import DAMAGES
from tests.unit.sampling.toy_policy import Letters, Script, answering

PROCESSOR = '''
import os, resource, time
import numpy as np
from relax_core.api import ModalityProcessor, Options, ProcessedMedia
from relax_core.media.source import content_key
from tests.passing import an_hour_passes


class WordsOptions(Options):
    log: str
    """Where calls are written."""


class Words(ModalityProcessor[WordsOptions]):
    """A medium of bytes that says what it does."""

    medium = "image"

    def budget(self, media, model):
        return 1

    def process(self, media, data, model):
        with open(self.options.log, "a") as log:
            log.write(data.decode() + "\\n")
        if data == b"hang":
            an_hour_passes()
            time.sleep(1000)
        if data == b"exit":
            os._exit(3)
        if data == b"full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        if data == b"bad":
            raise ValueError("a medium of bad bytes")
        if data == b"fault":
            raise ZeroDivisionError("the author's")
        if data == b"eat":
            np.ones(4 << 30, np.uint8)
        return ProcessedMedia(content_key(data), {"x": np.frombuffer(data, np.uint8)}, len(data))

    def view(self, whole, start_s, end_s):
        part = whole.tensors["x"][int(start_s):int(end_s)]
        return ProcessedMedia("-", {"x": part}, len(part))
'''
HOLE = 0x2588


class FastClock:
    """A clock whose sleeps end at once, and add up."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        if seconds != RESTORE_POLL_S:
            self.seconds += seconds
            self.slept.append(seconds)
        await asyncio.sleep(0.001)


class Shown(Letters):
    """Letters, and a block where an image is."""

    placeholders = {"image": HOLE}


@asynccontextmanager
async def pipeline(
    tmp_path: Path,
    limit_bytes: int | None = None,
    known_groups: int = 0,
    clock: Any = None,
    script: str = PROCESSOR,
    access: SourceAccess | None = None,
    **keys: Any,
) -> AsyncIterator[tuple[ProcessedOncePipeline, Path]]:
    (tmp_path / "words.py").write_text(script)
    log = tmp_path / "log"
    log.touch()
    children = LocalWorkers([str(tmp_path / "words.py")])
    choice = SimpleNamespace(
        chosen=Chosen("modality-processor", "words", {"log": str(log)}), name="words",
        **{"timeout_s": 30.0, "memory_mb": 3000, "max_mb": 1, "writable": (), **keys},
    )  # fmt: skip
    made = ProcessedOncePipeline(
        [choice],
        Shown(),
        ProcessStarter(children),
        str(tmp_path / "media"),
        {},
        limit_bytes,
        clock or FastClock(),
        access,
    )
    try:
        await made.start(known_groups)
        yield made, log
    finally:
        await made.stop()
        await children.close()


def said(*sources: str, view: tuple[float, float] | None = None) -> Message:
    return Message("user", tuple(Part(media=Media("image", source, view=view)) for source in sources))


def rendered(messages: list[Message]) -> Rendered:
    count = sum(len(message.content) for message in messages)
    return Rendered((65, *[HOLE] * count, 66))


async def test_media_are_processed_once_and_take_the_tokens_they_take(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    async with pipeline(tmp_path) as (made, log):
        messages = [said(str(tmp_path / "a"), "data:,abc", "data:,de")]
        await asyncio.gather(*(made.prepare(messages) for _ in range(5)))
        whole = made.fill_placeholders(rendered(messages), messages)
        assert whole.tokens == (65, *[HOLE] * 8, 66) and whole.media[0] == whole.media[1] != whole.media[2]
        assert log.read_text().split() == ["abc", "de"]
        store = MediaStore(tmp_path / "media")
        assert [store.get(key).tensors["x"].tobytes() for key in whole.media[1:]] == [b"abc", b"de"]
        part = [said("data:,abc", view=(1.0, 3.0))]
        await made.prepare(part)
        (key,) = made.fill_placeholders(rendered(part), part).media
        assert key not in whole.media and store.get(key).tensors["x"].tobytes() == b"bc"
        for kinds in (("image",), ()):  # a sample's session tells its environment which media the model takes
            session = Branch(Sample(Shown(), answering(Script()), Limits(9), lambda said: (), media=made), "", None, 7)
            assert session.media == kinds
            made._family.placeholders = {}


async def test_a_changed_file_is_another_medium(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    async with pipeline(tmp_path) as (made, _):
        messages = [said(str(tmp_path / "a"))]
        await made.prepare(messages)
        before = made.fill_placeholders(rendered(messages), messages)
        (tmp_path / "a").write_bytes(b"abcd")
        await made.prepare(messages)
        assert made.fill_placeholders(rendered(messages), messages).media != before.media


async def test_a_broken_medium_is_refused_by_name_and_the_others_continue(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_plugin_media.pipeline.ATTEMPTS", 2)
    reasons = {
        "bad": "image data:,bad: a medium of bad bytes", "fault": "ZeroDivisionError", "exit": "broke the process",
        "hang": "longer than 60 s", "eat": "MemoryError|broke the process",
    }  # fmt: skip
    async with pipeline(tmp_path, timeout_s=60.0) as (made, log):
        for word, reason in reasons.items():
            for _ in range(2):
                with pytest.raises(MediaRefused, match=reason):
                    await made.prepare([said(f"data:,{word}")])
            await made.prepare([said(f"data:,fine{word}")])
        counts = [log.read_text().split().count(word) for word in reasons]
        assert counts == [1, *[2] * 4], "only the content of a medium proves that it can't be read"
        with pytest.raises(MediaRefused, match="No such file"):
            await made.prepare([said(str(tmp_path / "none"))])
        with pytest.raises(MediaRefused, match="more than 1048576 bytes"):
            await made.prepare([said("data:," + "x" * (1 << 20) + "x")])


async def test_media_that_nothing_reads_and_texts_that_look_like_them(tmp_path):
    async with pipeline(tmp_path) as (made, _):
        with pytest.raises(MediaRefused, match=r'set media = \["audio"\]'):
            await made.prepare([Message("user", (Part(media=Media("audio", "data:,x")),))])
        with pytest.raises(MediaRefused, match="placeholders of image for media of nothing"):
            made.fill_placeholders(Rendered((65, HOLE)), [Message("user", "\u2588")])
        with pytest.raises(MediaRefused, match="not processed"):
            made.fill_placeholders(rendered([said("data:,y")]), [said("data:,y")])


async def test_an_unwritable_store_is_not_blamed_on_the_medium(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    messages = [said(str(tmp_path / "a"))]
    async with pipeline(tmp_path) as (made, _):
        facts = await made.examine(messages[0].content[0].media)
        stored = tmp_path / "media" / f"{facts['key']}.media"
        stored.mkdir()  # where the file should be
        with pytest.raises(InfrastructureError, match="Is a directory; fix the cause, then `relax resume`"):
            await made.prepare(messages)
        stored.rmdir()
        await made.prepare(messages)
        assert len(made.fill_placeholders(rendered(messages), messages).media) == 1


async def test_a_failure_that_the_content_does_not_prove_is_tried_again_and_then_held_off(tmp_path):
    source, clock = tmp_path / "a", FastClock()
    messages = [said(f"file://{source}")]
    async with pipeline(tmp_path, clock=clock) as (made, log):
        for hold_off_s in (HOLD_OFF_S, 2 * HOLD_OFF_S):
            with pytest.raises(MediaRefused, match=rf"No such file.*tried {ATTEMPTS} times"):
                await made.prepare(messages)
            assert clock.slept == [BACKOFF_S, 2 * BACKOFF_S], "attempts are bounded, and further and further apart"
            with pytest.raises(MediaRefused, match=rf"No such file.*tried again in {hold_off_s:.0f} s"):
                await made.prepare(messages)
            clock.seconds += hold_off_s
            clock.slept.clear()
        source.write_bytes(b"abc")
        await made.prepare(messages)
        assert log.read_text().split() == ["abc"] and not made._outages


async def test_a_killed_process_costs_no_sample(tmp_path):
    flag = tmp_path / "flag"
    script = PROCESSOR.replace('if data == b"exit":', f'if data == b"exit" and not os.path.exists({str(flag)!r}):')
    script = script.replace("os._exit(3)", f"open({str(flag)!r}, 'w').close(); os.kill(os.getpid(), 9)")
    async with pipeline(tmp_path, script=script) as (made, log):
        await asyncio.gather(*(made.prepare([said("data:,exit")]) for _ in range(4)))
        assert flag.exists() and log.read_text().split() == ["exit"] * 2


async def test_a_cancelled_caller_does_not_cancel_the_others(tmp_path):
    async with pipeline(tmp_path) as (made, _):
        first, *others = (asyncio.create_task(made.prepare([said("data:,abc")])) for _ in range(3))
        while not made._known:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(*others)
        assert first.cancelled()


async def test_a_full_disk_fails_all_callers_and_leaves_no_partial_file(tmp_path):
    async with pipeline(tmp_path) as (made, _):
        asked = (made.prepare([said("data:,full")]) for _ in range(3))
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, DiskFull) and "no space left to write (File too large, " in str(error)
        assert list((tmp_path / "media").iterdir()) == [] and not made._known


async def test_a_damaged_medium_is_made_again_from_its_source_while_its_reader_waits(tmp_path):
    async with pipeline(tmp_path, limit_bytes=1 << 20) as (made, log):
        for number, (name, damage) in enumerate(DAMAGES.items()):
            word, messages = f"abcd-{name}", [said(f"data:,abcd-{name}")]
            await made.prepare(messages, number)
            (key,) = made.fill_placeholders(rendered(messages), messages).media
            path = tmp_path / "media" / f"{key}.media"
            path.write_bytes(damage(path.read_bytes()))
            got = await asyncio.to_thread(MediaStore(tmp_path / "media", restore_s=30.0).get, key)
            assert got.tensors["x"].tobytes() == word.encode(), name
            assert log.read_text().split().count(word) == 2, name
            while MediaStore(tmp_path / "media").damaged():
                await asyncio.sleep(0.001)


async def test_the_next_run_does_not_take_over_a_damaged_medium(tmp_path):
    messages = [said(*(f"data:,abcd-{name}" for name in DAMAGES))]
    async with pipeline(tmp_path) as (made, _):
        await made.prepare(messages)
        keys = made.fill_placeholders(rendered(messages), messages).media
    for key, damage in zip(keys, DAMAGES.values(), strict=True):
        path = tmp_path / "media" / f"{key}.media"
        path.write_bytes(damage(path.read_bytes()))
    async with pipeline(tmp_path) as (made, _):
        await made.prepare(messages)
    for key, name in zip(keys, DAMAGES, strict=True):
        assert MediaStore(tmp_path / "media").get(key).tensors["x"].tobytes() == f"abcd-{name}".encode()


async def test_a_medium_whose_file_was_lost_or_cut_off_is_made_again_for_the_next_group(tmp_path):
    messages = [said("data:,abcd")]
    async with pipeline(tmp_path, limit_bytes=1 << 20) as (made, log):
        await made.prepare(messages, 0)
        (key,) = made.fill_placeholders(rendered(messages), messages).media
        for group, lose in enumerate((Path.unlink, lambda path: path.write_bytes(b"")), 1):
            lose(tmp_path / "media" / f"{key}.media")
            await made.prepare(messages, group)
            assert MediaStore(tmp_path / "media").get(key).tensors["x"].tobytes() == b"abcd"
            assert log.read_text().split() == ["abcd"] * (group + 1)
