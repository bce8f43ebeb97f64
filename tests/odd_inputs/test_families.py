# SPDX-License-Identifier: Apache-2.0
"""The turns of common families: each step is exactly the written text and follows the earlier ones, or is refused."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from relax_plugin_chat.chat import ChatFamily

from relax_core.api.errors import ConfigError
from relax_core.api.task import Message, ToolCall
from relax_core.data.dataset import example
from relax_core.data.row_proof import example_faults, prompt_faults
from tests.chat.tool_templates import open_family
from tests.odd_inputs.family_templates import FAMILIES

STEPS = tomllib.loads((Path(__file__).parent / "families.toml").read_text())
ASKED, SAID = Message("user", "q"), Message("assistant", "a")
CALLED = Message("assistant", "", (ToolCall("search", {"text": "x"}),))


def step(family: ChatFamily, name: str) -> str:
    """Return the text of one step: what is put in front of the policy, or what it is trained to say."""
    tokens: tuple[int, ...]
    if name == "prompt":
        tokens = family.start((ASKED,)).tokens
    elif name == "answer":
        tokens = family.turn((ASKED,), SAID)
    elif name == "thought":
        tokens = family.turn((ASKED,), Message("assistant", "<think>\nso\n</think>\n\na"))
    elif name == "call":
        tokens = family.turn((ASKED,), CALLED)
    elif name == "second":
        tokens = family.delta((ASKED, SAID), (Message("user", "r"),), family.stop_tokens[0]).tokens
    else:
        tokens = family.delta((ASKED, CALLED), (Message("tool", "1"),)).tokens
    return family.decode(tokens, skip_special=False)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatFamily]:
    return {name: open_family(tmp_path_factory.mktemp("model"), text, end) for name, (text, end) in FAMILIES.items()}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, steps in STEPS.items() for name in steps])
def test_a_step_is_exact_or_refused(families: dict[str, ChatFamily], family: str, name: str) -> None:
    wanted: str = STEPS[family][name]
    if wanted.startswith("refused: "):
        with pytest.raises(ConfigError, match=wanted.removeprefix("refused: ")):
            step(families[family], name)
    else:
        assert step(families[family], name) == wanted


@pytest.mark.parametrize("family", STEPS)
def test_the_proof_of_a_row_finds_no_fault(families: dict[str, ChatFamily], family: str) -> None:
    thought = Message("assistant", "<think>\nso\n</think>\n\na b")
    rows: list[tuple[Message, ...]] = [
        (ASKED, thought), (ASKED, thought, Message("user", "r "), thought), (ASKED, SAID), (ASKED, SAID, ASKED, SAID),
        (Message("system", "Be brief."), ASKED, Message("assistant", " 4\n"), ASKED),
    ]  # fmt: skip
    for messages in rows:
        with suppress(ConfigError):  # the answer has no thought, though the prompt opens one
            made = example(families[family], messages, None)
            assert [*example_faults(families[family], messages, None, (), made.tokens, made.mask)] == []
            shown = families[family].start(messages[:1]).tokens
            assert [*prompt_faults(families[family], messages[:1], (), shown)] == []


@pytest.mark.parametrize("family", STEPS)
def test_a_conversation_is_the_template_s_own_as_far_as_that_appends(
    families: dict[str, ChatFamily], family: str
) -> None:
    """Two plain turns: the joined steps are the rendered conversation, but for an opened thought."""
    if STEPS[family]["answer"].startswith("refused: "):
        return
    joined = "".join(step(families[family], name) for name in ("prompt", "answer", "second"))
    whole = families[family].text((ASKED, SAID, Message("user", "r")))
    if family.startswith("qwen3"):  # the template drops the thought of the first turn later
        joined = joined.replace("<think>\n\n</think>\n\n", "", 1)
    if family == "gpt-oss":  # it ends the last turn and earlier ones with different tokens
        joined = joined.replace("<|return|>", "<|end|>")
    assert joined == whole
