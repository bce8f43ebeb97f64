# SPDX-License-Identifier: Apache-2.0
"""From the TOML to the verdict: every option of a reward, filter, sampler, source, trainer or engine is set in a
configuration and seen in what it governs.

The options are those of the schema. A new one fails here until it is seen (`SEEN`), is known to be seen in a test of its
plugin (`ELSEWHERE`), or does not change what is learnt (`NOT_LEARNT`).
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import inspect
import math
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from relax_core.api import (
    AttemptId,
    ConfigError,
    Message,
    OptimizerSpec,
    Outcome,
    ProgramEnd,
    ProgramResult,
    Score,
    Task,
    TrainerSpec,
    Unreadable,
    component,
)
from relax_core.api.engine import Generated
from relax_core.testing.samples import trajectory
from relax_core.testing.trainer import Reinforce, started, tiny_model
from tests.trainers import ALGORITHM, train
from tests.wiring.options import CATALOGUE, built, options

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("reward", "filter", "sampler", "task-source", "trainer", "engine")
PLAYED = ("environment", "modality-processor")
"""Kinds whose components need a world of their own: a test of their distribution sets each option."""
OTHER_KINDS = {
    "algorithm": "test_algorithm_options.py",
    "model-family": "has no options in the box; [model] is seen in tests/unit/roles/test_every_setting.py",
    "sink": "who is told",
    "bus": "where rows are kept",
    "weight-transport": "how weights travel; what arrives is proved to be what was sent",
    "scaling-policy": "how many engines; each bound is seen in plugins/relax-plugin-scaling/tests",
    "sandbox": "where programs run",
    "role": "has no table",
    "table": "read by its own plugin, whose tests set each key",
    "check": "has no options",
}
See = Callable[[Any], Any]


@dataclass(frozen=True)
class Seen:
    """A value of an option, where it is seen, and as what. Other options that it needs are `beside`."""

    value: Any
    see: See
    want: Any
    beside: Mapping[str, Any] = field(default_factory=dict)


def pays(response: str, answer: Any = "12", *, cut: bool = False, **columns: Any) -> See:
    """See the score of a response; "refused" if the reward cannot judge."""
    task = Task("t1", "How much?", answer, columns)
    outcome = Outcome.TRUNCATED if cut else Outcome.FINISHED

    def score(reward: Any) -> Any:
        try:
            found = reward.score(task, trajectory(task, response, outcome))
            if inspect.isawaitable(found):
                found = asyncio.run(found)  # type: ignore[arg-type]
        except (ValueError, Unreadable):
            return "refused"
        return pytest.approx(found.value if isinstance(found, Score) else found)

    return score


CUT = {
    "exact": "12", "f1": "12", "maths": "12", "deepscaler": r"\boxed{12}", "geo3k": r"<think>so</think>\boxed{12}",
    "openr1mm": "<think>so</think><answer>12</answer>", "dapo": "Answer: 12",
}  # fmt: skip
"""Reward -> a right response, which may have been cut off."""
CHOICES = {"choices": ["10", "12"]}
THOUGHT = "<think>so</think>12"
WORDS = [
    {"name": "existence", "arguments": {"keywords": ["12"]}},
    {"name": "existence", "arguments": {"keywords": ["yes"]}},
]


def _share(seed: int, response: str = "12") -> float:
    """The number from 0 to 1 that the reward `random` draws."""
    digest = hashlib.blake2b(f"{seed}\0t1\0{response}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


class Asked:
    """A judge that says its lines in turn, and keeps what it was asked."""

    def __init__(self, *lines: str) -> None:
        self._lines, self.prompts, self.settings = list(lines), list[Any](), list[tuple[int, float]]()

    async def generate(
        self, prompt: Any, max_new_tokens: int = 256, *, temperature: float = 0.0, seed: int = 0
    ) -> Generated:
        self.prompts.append(prompt)
        self.settings.append((max_new_tokens, temperature))
        return Generated(self._lines.pop(0) if self._lines else "no verdict", (), (), "stop")

    async def score(self, prompt: Any, completions: Sequence[str]) -> tuple[tuple[float, ...], ...]:
        self.prompts.append(prompt)
        return tuple((-math.log(4.0 if completion == "yes" else 1.0),) for completion in completions)


def judged(*lines: str, see: Callable[[Asked, Any], Any] = lambda asked, value: value, cut: bool = False) -> See:
    """See a verdict of a judge that says these lines, or what it was asked."""

    def score(reward: Any) -> Any:
        asked = Asked(*lines)
        reward.engines = dict.fromkeys(("judge", "big"), asked)
        return see(asked, pays("4", cut=cut)(reward))

    return score


def compared(*lines: str, see: Callable[[Asked, Any], Any] = lambda asked, value: value, cut: bool = False) -> See:
    """See the scores of two or more responses that a judge with these lines compares, or what it was asked."""

    def score(reward: Any) -> Any:
        asked = Asked(*lines)
        reward.engines = dict.fromkeys(("judge", "big"), asked)
        task = Task("t1", "How much?")
        outcomes = [Outcome.TRUNCATED if cut else Outcome.FINISHED, *[Outcome.FINISHED] * 3]
        samples = [trajectory(task, str(number), outcome) for number, outcome in enumerate(outcomes)]
        found = asyncio.run(reward.score_group(task, samples))
        return see(asked, ["refused" if isinstance(one, Unreadable) else one.value for one in found])

    return score


def _asked(asked: Asked, _: Any) -> Any:
    """The messages of the first question as text, or the question itself."""
    first = asked.prompts[0]
    return first if isinstance(first, str) else [f"{one.role}: {one.text}" for one in first if isinstance(one, Message)]


YES = {"choices": {"yes": 1.0, "no": 0.0}}
SHORT = {"template": "{response}?"}
VERSUS = {"template": "{first}?{second}"}
ONCE = {"retries": 0}
SEEN: dict[str, dict[str, Seen]] = {
    "exact": {"strip": Seen(True, pays(" 12 "), 1.0)},
    "f1": {
        "exact_match": Seen(True, pays("12 apples"), 0.0),
        "think": Seen("required", pays("12"), 0.0),
        "tag": Seen("answer", pays("ten <answer>12</answer>"), 1.0),
    },
    "maths": {
        "answer_format": Seen("plain", pays(r"\boxed{0.5}", r"\frac{1}{2}"), "refused"),
        "boxed_only": Seen(True, pays("It is 12"), 0.0),
        "precision": Seen(1, pays("1.24", "1.2"), 1.0),
    },
    "deepscaler": {
        "think": Seen("required", pays(r"\boxed{12}"), 0.0),
        "precision": Seen(1, pays(r"\boxed{1.24}", "1.2"), 1.0),
    },
    "geo3k": {
        "tolerance": Seen(0.1, pays(r"<think>so</think>\boxed{1.6}", "1.5"), 1.0),
        "format_weight": Seen(0.25, pays(r"\boxed{12}"), 0.75),
    },
    "openr1mm": {
        "format_weight": Seen(0.25, pays("<answer>12</answer>"), 0.75),
        "precision": Seen(1, pays("<think>so</think><answer>1.24</answer>", "1.2"), 1.0),
    },
    "dapo": {
        "right": Seen(2.0, pays("Answer: 12"), 2.0),
        "wrong": Seen(-3.0, pays("Answer: 13"), -3.0),
        "strict_box": Seen(True, pays(r"\boxed{12}"), 1.0),
        "tail": Seen(8, pays("Answer: 12\nThat is all."), -1.0),
    },
    "multiple-choice": {
        "choices": Seen("options", pays("Answer: B", "B", options=["10", "12"]), 1.0),
        "letters": Seen(3, pays("Answer: C", "C"), 1.0),
        "think": Seen("required", pays("Answer: B", "B", **CHOICES), 0.0),
        "truncated": Seen(True, pays("Answer: B", "B", cut=True, **CHOICES), 1.0),
    },
    "gpqa": {
        "choices": Seen("options", pays("12", "B", options=["10", "12"]), 1.0),
        "letters": Seen(5, pays("Answer: E", "E"), 1.0),
        "think": Seen("required", pays("Answer: B", "B"), 0.0),
        "truncated": Seen(True, pays("Answer: B", "B", cut=True), 1.0),
    },
    "instructions": {
        "column": Seen("own", pays("12 yes", own=WORDS), 1.0),
        "mode": Seen("share", pays("12", instructions=WORDS), 0.5),
        "loose": Seen(True, pays("12 y*es*", instructions=WORDS), 1.0),
        "think": Seen("required", pays("12 yes", instructions=WORDS), 0.0),
        "truncated": Seen(True, pays("12 yes", instructions=WORDS, cut=True), 1.0),
    },
    "format": {
        "tags": Seen(["answer"], pays("12"), 0.0, {"pattern": ".*"}),
        "pattern": Seen(r"\d+", pays('"x"'), 0.0, {"json_schema": {}}),
        "json_schema": Seen({"type": "integer"}, pays('"x"'), 0.0, {"pattern": ".*"}),
        "mode": Seen("share", pays("12"), 0.5, {"pattern": r"\d+", "json_schema": {"type": "string"}}),
        "truncated": Seen(True, pays("12", cut=True), 1.0, {"pattern": r"\d+"}),
    },
    "overlong": {
        "max_length": Seen(2, pays("1 2 3 4", cut=True), -1.0, {"unit": "words", "buffer": 1}),
        "buffer": Seen(1, pays("1 2 3"), 0.0, {"unit": "words", "max_length": 4096}),
        "unit": Seen("words", pays("12 13"), 0.0, {"max_length": 4, "buffer": 1}),
    },
    "repetition": {
        "ngram": Seen(1, pays("a b a b"), -0.5),
        "penalty": Seen(-4.0, pays("a b a b"), -2.0, {"ngram": 1}),
        "unit": Seen("characters", pays("abab"), -0.5, {"ngram": 1}),
    },
    "random": {
        "seed": Seen(7, pays("12"), _share(7)),
        "low": Seen(0.5, pays("12"), 0.5 + 0.5 * _share(0)),
        "high": Seen(3.0, pays("12"), 3 * _share(0)),
    },
    "judge": {
        "engine": Seen("big", lambda reward: reward.needs_engines, ("big",)),
        "template": Seen("{response}?", judged("5", see=_asked), ["user: 4?"]),
        "system": Seen("Be strict.", judged("5", see=_asked), ["system: Be strict.", "user: 4?"], SHORT),
        "chat": Seen(False, judged("5", see=_asked), "4?", SHORT),
        "low": Seen(4.0, judged("7"), 0.5),
        "high": Seen(8.0, judged("6"), 0.75),
        "choices": Seen({"yes": 0.5, "no": 0.0}, judged("yes"), 0.5),
        "read": Seen("log-probs", judged("yes"), 0.2, YES),
        "keys": Seen({"a": 3.0, "b": 1.0}, judged('{"a": 10, "b": 0}'), 0.75),
        "votes": Seen(2, judged("5", "10"), 0.75, {"temperature": 1.0}),
        "combine": Seen("majority", judged("5", "5", "10"), 0.5, {"temperature": 1.0, "votes": 3}),
        "retries": Seen(2, judged("-", "-", "5", see=lambda asked, _: len(asked.prompts)), 3),
        "pattern": Seen(r"Score: (\d+)", judged("Score: 4, of 5"), 0.4),
        "max_new_tokens": Seen(7, judged("5", see=lambda asked, _: asked.settings), [(7, 0.0)]),
        "temperature": Seen(0.5, judged("5", see=lambda asked, _: asked.settings), [(512, 0.5)]),
        "truncated": Seen(True, judged("5", cut=True), 0.5),
    },
    "judge-pairs": {
        "engine": Seen("big", lambda reward: reward.needs_engines, ("big",)),
        "template": Seen("{first}?{second}", compared(see=_asked), ["user: 0?1"]),
        "system": Seen("Be strict.", compared(see=_asked), ["system: Be strict.", "user: 0?1"], VERSUS),
        "chat": Seen(False, compared(see=_asked), "0?1", VERSUS),
        "choices": Seen({"A": 0.5, "C": 0.5}, compared(*["[[C]]"] * 12), [0.5] * 4),
        "pattern": Seen("Best: (.)", compared(*["Best: A", "Best: B"] * 6), pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])),
        "read": Seen("log-probs", compared(), [0.5] * 4),
        "opponents": Seen(1, compared(see=lambda asked, _: len(asked.prompts)), 8, ONCE),
        "retries": Seen(2, compared(see=lambda asked, _: len(asked.prompts)), 36),
        "max_new_tokens": Seen(7, compared(see=lambda asked, _: asked.settings[0]), (7, 0.0)),
        "temperature": Seen(0.5, compared(see=lambda asked, _: asked.settings[0]), (512, 0.5)),
        "truncated": Seen(True, compared(*["[[tie]]"] * 12, cut=True), [0.5] * 4),
    },
}
for _name, _response in CUT.items():
    SEEN[_name]["truncated"] = Seen(True, pays(_response, cut=True), 1.0)


def rejects(rewards: Sequence[float], cut: int = 0) -> See:
    """See if a filter rejects a group with these rewards, of which the first samples were cut off."""
    task = Task("t1", "How much?", "12")
    outcomes = [Outcome.TRUNCATED if place < cut else Outcome.FINISHED for place in range(len(rewards))]
    attempts = [AttemptId(0, place, 0) for place in range(len(rewards))]
    samples = [trajectory(task, "12", outcome) for outcome in outcomes]
    return lambda rule: bool(rule.reject(task, attempts, samples, rewards))


TASKS = [
    Task(f"t{at}", "?", None, {"difficulty": at, "length": -at, "source": "ab"[at % 2], "kind": "xy"[at < 5]})
    for at in range(10)
]
"""Tasks from easy to hard; the hard ones are short. Sources alternate, kinds do not."""


def picks(num: int = 60) -> See:
    """See which of `TASKS` a sampler picks; "refused" if it refuses the tasks."""

    def seen(sampler: Any) -> Any:
        try:
            sampler.open(TASKS)
        except ConfigError:
            return "refused"
        return {sampler.pick(group, len(TASKS), 0) for group in range(num)}

    return seen


def rate(*rewards: list[float]) -> See:
    """See the rate of success of a task whose groups got these rewards."""

    def seen(sampler: Any) -> Any:
        for group, own in enumerate(rewards):
            sampler.learned(group, 0, own)
        return pytest.approx(sampler.state()["rates"]["0"])

    return seen


def _picks_of_solved(sampler: Any) -> list[int]:
    """Picks among two tasks of which one is always solved."""
    sampler.learned(0, 0, [1.0])
    return [sampler.pick(group, 2, 0) for group in range(50)]


EVENLY = [Random(f"success-rate 0 {group}").randrange(2) for group in range(50)]
SEEN |= {
    "zero-variance": {"tolerance": Seen(0.5, rejects([0.0, 0.5]), True)},
    "reward-band": {"low": Seen(0.3, rejects([0.0, 0.5]), True), "high": Seen(0.6, rejects([0.5, 1.0]), True)},
    "truncated": {"most": Seen(0.8, rejects([0.0] * 4, cut=3), False)},
    "shuffle": {"shuffle": Seen(False, picks(5), {0, 1, 2, 3, 4})},
    "curriculum": {
        "column": Seen("length", picks(), {8, 9, 7}),
        "start": Seen(0.5, picks(), {0, 1, 2, 3, 4, 5}),
        "groups": Seen(1, picks(), set(range(10))),
    },
    "mixture": {
        "column": Seen("kind", picks(), {0, 1, 2, 3, 4}, {"weights": {"x": 0.0}}),
        "weights": Seen({"a": 0.0}, picks(), {1, 3, 5, 7, 9}),
    },
    "success-rate": {
        "floor": Seen(0.25, _picks_of_solved, EVENLY),
        "memory": Seen(0.75, rate([1.0], [0.0]), 0.75),
        "best": Seen(2.0, rate([1.0]), 0.5),
    },
}  # fmt: skip


class Programs:
    """A sandbox in which every program prints the next of these lines."""

    python = "python"

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Programs]:
        yield self

    async def write(self, name: str, content: bytes) -> None:
        """Nothing reads the files."""

    async def run(self, command: Sequence[str], stdin: bytes = b"") -> ProgramResult:
        return ProgramResult(ProgramEnd.OK, 0, next(self._lines).encode(), b"", 0.0)


def prints(*lines: str, cut: bool = False) -> See:
    """See the score of a program in Python that should print 1 and then 0.5, and prints these lines."""
    cases = [{"input": "", "output": "1"}, {"input": "", "output": "0.5"}]

    def score(reward: Any) -> Any:
        reward.sandbox = Programs(*lines)
        return pays("```python\nprint(1)\n```", None, cut=cut, cases=cases)(reward)

    return score


SEEN["code"] = {
    "language": Seen("c", prints("1", "0.5"), 0.0),
    "mode": Seen("share", prints("1", "0"), 0.5),
    "max_cases": Seen(1, prints("1", "0"), 1.0),
    "tolerance": Seen(0.1, prints("1", "0.55"), 1.0),
    "truncated": Seen(True, prints("1", "0.5", cut=True), 1.0),
    "case_s": Seen(1.5, lambda reward: reward.needs_sandbox.wall_s, 1.5),
    "program_memory_mb": Seen(64, lambda reward: reward.needs_sandbox.memory_mb, 64),
}


@cache
def _tiny() -> str:
    """The folder of a tiny model."""
    folder = Path(tempfile.mkdtemp(prefix="relax-wiring-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(tiny_model(folder))


def trained(see: Callable[[Any, list[Mapping[str, Any]]], Any], updates: int = 0, dtype: str = "float32") -> See:
    """See a trainer of a tiny model after some updates, and the metrics of these."""

    def seen(trainer: Any) -> Any:
        trainer.build = lambda chosen: Reinforce()
        trainer = started(trainer, TrainerSpec({"path": _tiny(), "dtype": dtype}, ALGORITHM, OptimizerSpec(1e-3)))
        try:
            return see(trainer, [train(trainer, number).metrics for number in range(updates)])
        finally:
            trainer.stop()

    return seen


def _scales(_: Any, metrics: list[Mapping[str, Any]]) -> list[float]:
    return [own["train/loss_scale"][0] for own in metrics]


SEEN["torch"] = {
    "optimizer": Seen("sgd", trained(lambda trainer, _: type(trainer._optimizer).__name__), "SGD"),
    "loss_scale": Seen(8.0, trained(_scales, 1, "float16"), [8.0]),
    "loss_scale_window": Seen(1, trained(_scales, 2, "float16"), [8.0, 16.0], {"loss_scale": 8.0}),
}
REMOTE, GYM = "plugins/relax-plugin-rewards/tests/test_remote.py", "plugins/relax-plugin-reasoning-gym/tests"
MEGATRON = "plugins/relax-plugin-megatron/tests/test_layouts.py"
TABLE = "tests/unit/data/test_table.py::test_a_folder_with_several_splits_is_refused_with_their_names"
QUESTION = f"{GYM}/test_source.py::test_a_task_is_a_question_with_the_instruction_and_the_recipe_of_its_entry"
ELSEWHERE = {
    "function.function": "tests/unit/rewards/test_functions.py::test_the_component_calls_the_function_of_its_file",
    "megatron.loss_scale": f"{MEGATRON}::test_losses_of_float16_are_scaled_as_configured_and_gradients_are_not",
    "megatron.loss_scale_window": f"{MEGATRON}::test_losses_of_float16_are_scaled_as_configured_and_gradients_are_not",
    "remote.url": f"{REMOTE}::test_a_sample_goes_out_whole_and_its_score_comes_back",
    "remote.headers": f"{REMOTE}::test_headers_can_be_secrets_and_options_show_no_credential",
    "remote.truncated": f"{REMOTE}::test_a_cut_response_is_sent_and_marked_by_default",
    "reasoning-gym.answer": f"{GYM}/test_reward.py::test_only_a_full_score_counts_unless_parts_do",
    "reasoning-gym.partial": f"{GYM}/test_reward.py::test_only_a_full_score_counts_unless_parts_do",
    "reasoning-gym.truncated": f"{GYM}/test_reward.py::test_a_response_cut_off_scores_zero_by_default",
    "reasoning-gym.instruction": QUESTION,
    "reasoning-gym.chat": QUESTION,
    "reasoning-gym.allow_barred": f"{GYM}/test_source.py::test_a_barred_set_can_be_allowed_and_columns_cannot_be_renamed",
    "files.split": TABLE,
    "table.split": TABLE,
}
NOT_LEARNT = {
    "how often and how long a service is asked": {
        "remote": {"request_timeout_s", "retries", "backoff_s", "concurrency"},
    },
    "memory and speed; the conformance suites compare the results": {
        "torch": {
            "device", "attention", "compile", "activation_checkpointing", "share_prefixes", "sharding",
            "tensor_parallel", "collective_timeout_s", "offload_optimizer", "logits_mb",
            "peak_tflops",
        },
        "megatron": {
            "tensor_parallel", "sequence_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel",
            "expert_parallel", "expert_tensor_parallel", "recompute", "offload_optimizer", "logits_mb", "collective_timeout_s",
        },
        "transformers": {
            "device", "attention", "max_batch_rows", "max_batch_tokens", "max_prefill_tokens", "deltas_every",
        },
        "vllm": {
            "tensor_parallel", "pipeline_parallel", "expert_parallel", "kv_cache_mb", "gpu_memory", "max_batch_rows",
            "max_batch_tokens", "prefix_cache", "keep_weights", "graphs", "draft_tokens",
        },
        "sglang": {
            "kv_cache_tokens", "gpu_memory", "max_batch_rows", "max_prefill_tokens", "prefix_cache", "keep_weights",
            "attention", "graphs",
        },
    },
    "arguments of the library, which only the library knows": {"vllm": {"engine_args"}, "sglang": {"server_args"}},
}  # fmt: skip
NOT_PLAYED = {
    "agent.judge_s": "when a judge is given up",
    "agent.directory": "where a program runs",
    "verifiers.start_s": "when an environment is given up",
    "openenv.max_message_mb": "when a sample is given up",
    "mcp.images": "plugins/relax-plugin-mcp/tests shows the function that reads it",
}
SET = [(kind, name, option) for kind in KINDS for name, option in options(kind) if option in SEEN.get(name, ())]


def test_every_option_is_seen_or_is_known_not_to_change_what_is_learnt() -> None:
    there = {f"{name}.{option}" for kind in KINDS for name, option in options(kind)}
    seen = {f"{name}.{option}" for name, own in SEEN.items() for option in own}
    known = {f"{name}.{option}" for group in NOT_LEARNT.values() for name, own in group.items() for option in own}
    assert {*KINDS, *PLAYED, *OTHER_KINDS} == set(component.KINDS), "say where the options of the new kind are seen"
    new = sorted(there - seen - known - ELSEWHERE.keys())
    assert not new, f"show in SEEN what {new} govern, name a test in ELSEWHERE, or give the reason in NOT_LEARNT"
    assert not (seen | known | ELSEWHERE.keys()) - there, "these are no options any more"
    assert not known & (seen | ELSEWHERE.keys()) and not seen & ELSEWHERE.keys(), "said twice"


@pytest.mark.parametrize("option", ELSEWHERE)
def test_every_test_named_for_a_setting_exists(option: str) -> None:
    path, _, name = ELSEWHERE[option].partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize(("kind", "name", "option"), SET, ids=[f"{name}.{option}" for _, name, option in SET])
def test_an_option_is_seen_in_what_it_governs(kind: str, name: str, option: str) -> None:
    seen = SEEN[name][option]
    assert seen.see(built(kind, name, {**seen.beside, option: seen.value})) == seen.want
    assert seen.see(built(kind, name, seen.beside)) != seen.want, "it is so without the option, and shows nothing"


@cache
def _tests_of(distribution: str) -> str:
    """The text of the tests of a package."""
    folder = ROOT / "plugins" / distribution.replace("_", "-") / "tests"
    files = (
        folder.rglob("*.py")
        if folder.is_dir()
        else (ROOT / "tests" / "unit" / "sampling").glob("test_environment_*.py")
    )
    return "".join(file.read_text() for file in files)


def test_options_of_environments_and_media_are_set_in_tests_of_their_distribution() -> None:
    unset = {
        f"{name}.{option}"
        for kind in PLAYED
        for name, option in options(kind)
        if not re.search(
            rf"\b{option}\b\W{{0,2}}[=:]", _tests_of(CATALOGUE.target(kind, name).__module__.partition(".")[0])
        )
    }
    assert unset == NOT_PLAYED.keys(), "set it in a test, or say here why it does not change what is learnt"
