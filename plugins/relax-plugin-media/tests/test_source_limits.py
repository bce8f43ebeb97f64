# SPDX-License-Identifier: Apache-2.0
"""Processors read only the sources that `[data.media]` allows, also where they open a source themselves."""

import pytest
from relax_plugin_media.host import MediaHost

from relax_core.api import Media, ModalityProcessor
from relax_core.media.access import SourceAccess
from relax_core.media.placeholders import MediaRefused
from relax_core.media.source import read_source
from tests.unit.media.test_access import CLOSED, server  # noqa: F401 fixture

from .test_media_pipeline import pipeline, said


async def test_a_flaky_server_costs_no_sample_and_a_forbidden_server_is_not_contacted(server, tmp_path):  # noqa: F811
    async with pipeline(tmp_path, access=SourceAccess(["127.0.0.1"])) as (made, log):
        await made.prepare([said(f"{server.url}/flaky")])
        assert len(server.asked) == 3 and log.read_text().split() == ["abc"]
        server.asked.clear()
        with pytest.raises(MediaRefused, match=r"data.media.allowed_hosts: got http://localhost"):
            await made.prepare([said(f"http://localhost:{server.server_port}/a")])
        assert server.asked == []
    async with pipeline(tmp_path, access=CLOSED) as (made, _):
        with pytest.raises(MediaRefused, match=rf"image {tmp_path}/log: data.media.allowed_folders"):
            await made.prepare([said(f"{tmp_path}/log")])


def test_a_processor_that_reads_a_header_itself_is_held_to_the_limits_too(server, tmp_path):  # noqa: F811
    class Header(ModalityProcessor):
        medium = "image"

        def budget(self, media, model):
            return len(read_source(media.source))

        def process(self, media, data, model): ...

    host = MediaHost()
    host.component, host.build = None, lambda chosen: Header(None)
    host.open(str(tmp_path), {}, 1000, 0, (("127.0.0.1",), (str(tmp_path),)))
    (tmp_path / "a").write_bytes(b"abcd")
    assert host.handle(("budget", Media("image", f"{server.url}/a"))) == 3
    assert host.handle(("budget", Media("image", f"{tmp_path}/a"))) == 4
    for source in (f"http://localhost:{server.server_port}/a", "/etc/passwd"):
        with pytest.raises(ValueError, match="data.media"):
            host.handle(("budget", Media("image", source)))
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        host.handle(("budget", Media("image", f"{server.url}/endless")))
