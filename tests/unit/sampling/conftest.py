# SPDX-License-Identifier: Apache-2.0
"""Chat families as a run opens them, over a folder with a tokenizer and no model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_chat.chat import ChatFamily


@pytest.fixture(scope="module")
def chat_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ChatFamily]:
    """Open a family whose tokenizer `save` writes; keywords are keys of the model table."""

    def opened(save: Callable[[Path], object], **table: Any) -> ChatFamily:
        folder = tmp_path_factory.mktemp("model")
        save(folder)
        (folder / "config.json").write_text("{}")
        family = ChatFamily()
        family.open({"path": str(folder), **table})
        return family

    return opened
