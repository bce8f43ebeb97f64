# SPDX-License-Identifier: Apache-2.0
"""Chat families beside `renderers`, a library that does the same by other means: a class of Python for each family.

Both read the same calls in what a policy wrote, and both go on behind its tokens with the same tokens.
"""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from relax_plugin_agents.history import Call, History
from relax_plugin_agents.model_request import ModelRequest
from relax_plugin_chat.chat import ChatFamily
from relax_plugin_chat.chat_template import tool_schema
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from relax_core.api import Environment, Message, Task, Trajectory
from relax_core.api.task import ToolCall
from relax_core.sampling.episode import InProcess, Limits, run_episode
from tests.chat.tool_templates import BAR, CALL, DEEPSEEK_V3, GLM, HARMONY, HERMES, KIMI, LLAMA, QWEN3_CODER, TOOLS
from tests.clients.conftest import PYTHON
from tests.clients.policy import Says
from tests.unit.sampling.toy_policy import answering

PATIENCE_S = 60.0
NOT_BEHIND_A_TOOL = "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
NOT_BEFORE_A_TOOL = "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"


def answers_of_tools_together(chatml: str) -> str:
    """A template of Qwen, which shows answers of tools as one message of the user."""
    answers = (
        "{%- if message.role == 'tool' %}" + NOT_BEHIND_A_TOOL + "{{- '<|im_start|>user' }}{%- endif %}"
        "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
        + NOT_BEFORE_A_TOOL + "{{- '<|im_end|>\\n' }}{%- endif %}{%- else %}"
    )  # fmt: skip
    loop, end = "{%- for message in messages %}", "{%- endfor %}{%- if add_generation_prompt %}"
    assert chatml.count(loop) == chatml.count(end) == 1
    return chatml.replace(loop, loop + answers).replace(end, "{%- endif %}" + end)


THINKS = "<|im_start|>assistant\\n' }}{%- endif %}", "<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
TRIMMED = "message.content", "message.content | trim"
OBSERVED = (
    "<|observation|>\n<tool_response>\n",
    NOT_BEHIND_A_TOOL + "{{- '<|observation|>' }}{%- endif %}{{- '\\n<tool_response>\\n' }}",
)
QWEN = (("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"))  # fmt: skip
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (answers_of_tools_together(HERMES), *QWEN, ("<|im_end|>",)),
    "qwen3-coder": (answers_of_tools_together(QWEN3_CODER).replace(*THINKS).replace(*TRIMMED), *QWEN, ("<|im_end|>",)),
    "glm": (
        GLM.replace(*OBSERVED),
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ("<|observation|>", "<|user|>", "<|endoftext|>"),
    ),
    "llama": (
        LLAMA, ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
                "<|python_tag|>"), (), ("<|eot_id|>", "<|eom_id|>"),
    ),
    "deepseek": (
        DEEPSEEK_V3,
        tuple(f"<{BAR}{name}{BAR}>" for name in (
            "begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end",
            "tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end",
            "tool▁output▁begin", "tool▁output▁end",
        )), (), (f"<{BAR}end▁of▁sentence{BAR}>",),
    ),
    "kimi": (
        KIMI,
        ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls_section_begin|>",
         "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        (), ("<|im_end|>",),
    ),
    "harmony": (
        HARMONY, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"), (),
        ("<|return|>",),
    ),
}  # fmt: skip
"""By format: template, special tokens, tokens that are not special, and those that end a turn."""
THOUGHTS = dict.fromkeys(("hermes", "qwen3-coder"), "<think>\nso\n</think>\n\n") | {"glm": "<think>so</think>\n"}
"""By format: a thought as the family writes it before each turn."""
BRIDGED = ("hermes", "qwen3-coder", "glm", "llama")
"""Those whose templates here go on between turns as the family's own do."""


class Renderers:
    """The other library, in the interpreter of the clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = [PYTHON, str(Path(__file__).with_name("renderers_host.py"))]
        self._host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, family: str, **request: Any) -> Any:
        assert self._host.stdin and self._host.stdout
        tools = [tool_schema(tool) for tool in TOOLS]
        whole = {
            "family": family,
            "tokenizer": str(self._folder / family / "tokenizer.json"),
            "tools": tools,
            **request,
        }
        self._host.stdin.write(json.dumps(whole) + "\n")
        self._host.stdin.flush()
        ready, _, _ = select.select([self._host.stdout], [], [], PATIENCE_S)
        assert ready, f"renderers gave no answer within {PATIENCE_S:.0f} s"
        return json.loads(self._host.stdout.readline())

    def stop(self) -> None:
        self._host.kill()
        self._host.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def renderers(folder: Path) -> Iterator[Renderers]:
    host = Renderers(folder)
    yield host
    host.stop()


@pytest.fixture(scope="module")
def families(folder: Path) -> dict[str, ChatFamily]:
    """Families with tokenizers of their own, whose merges go over the ends of lines."""
    return {name: opened(folder / name, *told) for name, told in FAMILIES.items()}


def opened(
    folder: Path, template: str, special: tuple[str, ...], plain: tuple[str, ...], ends: tuple[str, ...]
) -> ChatFamily:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([template, template.replace("\\n", "\n"), *CALL.values()], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in ends]
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": special[0], "eos_token": ends[0]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (folder / "chat_template.jinja").write_text(template)
    family = ChatFamily()
    family.open({"path": str(folder)})
    return family


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


# -- calls -----------------------------------------------------------------------------------------------------------

LETTERS = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Z"), exclude_characters='<>|"\\`'), min_size=1, max_size=12
)
VALUES = {
    "text": LETTERS,
    "count": st.integers(-(2**40), 2**40),
    "ratio": st.floats(-1e6, 1e6),
    "on": st.booleans(),
    "items": st.lists(st.integers() | LETTERS | st.none(), max_size=3),
    "table": st.dictionaries(LETTERS, st.integers() | LETTERS, max_size=3),
}


def calls_for(name: str) -> st.SearchStrategy[ToolCall]:
    """Calls whose values both can read: Python's words for truth, which Qwen's template writes, are read by us alone."""
    values = {key: value for key, value in VALUES.items() if (name, key) != ("qwen3-coder", "on")}
    return st.builds(
        ToolCall, st.sampled_from([tool.name for tool in TOOLS]), st.fixed_dictionaries({}, optional=values)
    )


def agree(
    renderers: Renderers, name: str, family: ChatFamily, tokens: tuple[int, ...], before: tuple[int, ...]
) -> None:
    """Check that both read the same, or that both say that a call of the turn is none; ours makes no call then."""
    theirs = renderers.ask(name, parse=[before, tokens])
    said, calls, error = family.parse(tokens, TOOLS, before)
    shown = family.decode(tokens, skip_special=False)
    if any(status != "ok" for _, _, status in theirs["calls"]):
        assert error and not calls, (shown, theirs)
        return
    assert (error, [[call.name, dict(call.arguments)] for call in calls]) == (
        "", [[called, arguments] for called, arguments, _ in theirs["calls"]],
    ), (shown, theirs)  # fmt: skip
    assert said.rpartition("</think>")[2].strip() == theirs["content"].strip(), (shown, theirs)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_both_libraries_read_a_rendered_conversation_alike(
    renderers: Renderers, families: dict[str, ChatFamily], name: str, data: st.DataObject
) -> None:
    family, asked = families[name], user("go")
    calls = tuple(data.draw(st.lists(calls_for(name), max_size=1 if name == "llama" else 3)))
    words = "" if name == "llama" and calls else data.draw(st.sampled_from(["Let me see.", "I look (twice)."]))
    text = THOUGHTS.get(name, "") + words
    agree(renderers, name, family, family.turn(asked, Message("assistant", text, calls)), family.start(asked).tokens)


WRONG = {
    "hermes": [
        '<tool_call>\n{"name": "search", "arguments": {}', "<tool_call>\n{name: search}\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "search"}\n</tool_call><tool_call>\nsearch\n</tool_call>',
        '<think>\n<tool_call>\n{"name": "search"}\n</tool_call>\n</think>\n\nno', "no call",
    ],
    "harmony": [
        "<|channel|>commentary to=functions.search json<|message|>{text<|call|>",
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant to=functions.search<|message|>x<|call|>",
        "<|channel|>analysis<|message|>search{}<|end|><|start|>assistant<|channel|>final<|message|>no<|return|>",
        "<|channel|>analysis to=functions.search<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>no<|return|>",
    ],
    "deepseek": [CALL["deepseek"].replace("search", "function").replace("{}", "search\n```json\n{x}\n```")],
    "kimi": [CALL["kimi"].replace("{}", "{x")],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_both_libraries_reject_the_same_calls(
    renderers: Renderers, families: dict[str, ChatFamily], name: str, text: str
) -> None:
    family = families[name]
    agree(renderers, name, family, family.encode(text), family.start(user("go")).tokens)


# -- between turns ---------------------------------------------------------------------------------------------------


class Asked(Environment):
    """Lets a test be the agent."""

    in_process = True
    agent: Callable[[History], Awaitable[None]]

    async def run(self, task: Task, seed: int, session: Any) -> None:
        await self.agent(History(session))


async def played(family: ChatFamily, policy: Says, agent: Callable[[History], Awaitable[None]]) -> Trajectory:
    environment, task = Asked(), Task("t", user("go"), "")
    environment.agent = agent
    first = family.start(task.prompt, TOOLS)
    trajectory = await run_episode(
        task, first, 7, InProcess(environment, PATIENCE_S), family, answering(policy), Limits(4000, 100)
    )
    assert trajectory.outcome.judged, trajectory.info
    return trajectory


def fields(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.text} | ({"name": message.name} if message.name else {})


@pytest.mark.parametrize("name", BRIDGED)
async def test_a_conversation_continues_with_the_tokens_of_the_other_library(
    renderers: Renderers, families: dict[str, ChatFamily], name: str
) -> None:
    """Behind calls, an answer, and an answer that was cut off: what stands between two turns are the same tokens."""
    family = families[name]
    thought = THOUGHTS.get(name, "")
    calls = (ToolCall("search", {"text": "x"}), ToolCall("find_all", {"count": 2}))[: 1 if name == "llama" else 2]
    words = "" if name == "llama" else "I look."
    written = family.turn(user("go"), Message("assistant", thought + words, calls))
    begun = thought.removeprefix("<think>\n") if name == "qwen3-coder" else thought  # whose prompt begins the thought
    spoken = [family.encode(begun + text) for text in ("It is 42.", "Well,")]
    end = family.encode(FAMILIES[name][3][1 if name == "glm" else 0])
    # A turn of GLM that was cut off ends where the next speaks, as its template shows it; there it gets a token of its own.
    cut = spoken[1] if name != "glm" else spoken[1] + end
    turns = [written, spoken[0] + end, cut, spoken[0] + end]
    policy = Says(list(turns), family.stop_tokens)
    found = tuple(Message("tool", f"found\n\n{at}", name=call.name) for at, call in enumerate(calls))
    added = (found, user(" why?\n\nTell me "), user("go on"))

    async def agent(history: History) -> None:
        messages = user("go")
        for turn, said in zip(turns, (*added, ()), strict=True):
            limit = len(turn) if turn[-1] not in family.stop_tokens else None
            call: Call = history.begin(ModelRequest(messages, TOOLS, limit))
            action = await call.branch.generate(limit)
            history.answered(call, action)
            call.delivered = True
            messages += (Message("assistant", action.text, action.tool_calls), *said)
        assert history.reasons() == {"first": 1, "continued": 3}

    trajectory = await played(family, policy, agent)
    assert len(trajectory.rows()) == 1
    for (asked, said), (then, _), messages in zip(policy.calls[:-1], policy.calls[1:], added, strict=True):
        bridged = renderers.ask(name, bridge=[asked, said, [fields(message) for message in messages]])
        assert bridged is not None
        assert family.decode(then, skip_special=False) == family.decode(bridged, skip_special=False)
        assert list(then) == bridged
