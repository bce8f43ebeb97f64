# SPDX-License-Identifier: Apache-2.0
"""A run without processors refuses media and placeholders in text; a run with processors needs their host."""

from types import SimpleNamespace

import pytest

from relax_core.api import ConfigError, Media, Message, Rendered
from relax_core.api.task import Part
from relax_core.config.compose import compose
from relax_core.data.media import media_pipeline
from relax_core.media.placeholders import MediaRefused
from relax_core.registry.catalogue import Catalogue

TEXT = [Message("user", "a")]


async def test_without_processors_text_passes_and_media_are_refused() -> None:
    pipeline = media_pipeline("", (), SimpleNamespace(placeholders={"image": 7}))  # type: ignore[arg-type]
    await pipeline.start()
    await pipeline.prepare(TEXT)
    assert pipeline.kinds == () and await pipeline.num_features(TEXT) == 0
    assert pipeline.fill_placeholders(Rendered((1, 2)), TEXT) == Rendered((1, 2))
    with pytest.raises(MediaRefused, match="texts must not contain any"):
        pipeline.fill_placeholders(Rendered((1, 7)), TEXT)
    shown = [Message("user", (Part(media=Media("image", "a.png")),))]
    for asked in (pipeline.prepare(shown), pipeline.num_features(shown)):
        with pytest.raises(MediaRefused, match=r'set media = \["image"\]'):
            await asked
    pipeline.release(0)
    pipeline.release_below(1)
    await pipeline.stop()


def test_a_configuration_with_media_names_the_plugin_that_hosts_processors() -> None:
    catalogue = Catalogue.load(environ={"RELAX_DISABLE_PLUGINS": "relax-plugin-media"})
    data = {
        "model": {"path": "/m"},
        "data": {"train": "/t.jsonl"},
        "media": ["image"],
        "algorithm": "grpo",
        "rewards": ["exact"],
    }
    with pytest.raises(ConfigError, match="media.*relax-plugin-media"):
        compose([data], (), catalogue, on_disk=False)
