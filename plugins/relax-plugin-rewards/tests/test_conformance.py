# SPDX-License-Identifier: Apache-2.0
"""All rewards keep what every reward promises."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import math_verify  # noqa: F401 (the suites' processes are forked with the slow modules that this process has)
import pytest
from relax_plugin_rewards.remote import Remote, RemoteOptions

from relax_core.api import Task
from relax_core.testing.reward import RewardSuite

pytestmark = pytest.mark.one_process("exercises")
HALF = Task("half", "What is 1/2 of 1?", "1/2")
CAPITAL = Task("capital", "Which is the capital of Italy?", "B", {"choices": ["Paris", "Rome", "Berlin", "Oslo"]})
BRIEF = Task(
    "brief", "Say hello in at most three words.", None,
    {"instructions": [
        {"name": "length_constraints:number_words", "arguments": {"num_words": 3, "relation": "at most"}},
        {"name": "keywords:existence", "arguments": {"keywords": ["hello"]}},
    ]},
)  # fmt: skip


class TestExact(RewardSuite):
    component = "exact"
    samples = ((HALF, "0.5"), (HALF, "1/2"), (HALF, "1/2 "))
    best = 1


class TestMaths(RewardSuite):
    component = "maths"
    samples = ((HALF, "two"), (HALF, r"so it is \boxed{\frac{1}{2}}"), (HALF, "2"))
    best = 1


class TestDeepScaler(RewardSuite):
    component = "deepscaler"
    samples = ((HALF, "1/2"), (HALF, r"<think>2?</think> \boxed{0.5}"), (HALF, r"\boxed{0.5} or \boxed{2}"))
    best = 1


class TestDapo(RewardSuite):
    component = "dapo"
    samples = ((HALF, "1/2"), (HALF, "Answer: 0.5"), (HALF, "Answer: 2"))
    best = 1


class TestOpenR1MM(RewardSuite):
    component = "openr1mm"
    samples = ((HALF, "1/2"), (HALF, "<think>so</think>\n<answer>0.5</answer>"), (HALF, "<answer>0.5</answer>"))
    best = 1


class TestGeo3k(RewardSuite):
    component = "geo3k"
    samples = ((HALF, "1/2"), (HALF, r"<think>so</think> \boxed{0.5}"), (HALF, r"<think>so</think> \boxed{0.6}"))
    best = 1


class TestMultipleChoice(RewardSuite):
    component = "multiple-choice"
    samples = ((CAPITAL, "Answer: A"), (CAPITAL, "The answer is (B)."), (CAPITAL, "A, B, C or D"))
    best = 1


class TestGpqa(RewardSuite):
    component = "gpqa"
    samples = ((Task("q", "Which?", "B"), "Answer: A"), (Task("q", "Which?", "B"), r"\boxed{B}"))
    best = 1


class TestF1(RewardSuite):
    component = "f1"
    samples = ((CAPITAL, "Paris"), (Task("c", "?", ["Rome", "Roma"]), "Roma!"), (Task("c", "?", "Rome"), "old Rome"))
    best = 1


class TestInstructions(RewardSuite):
    component = "instructions"
    samples = ((BRIEF, "Good day"), (BRIEF, "Hello you"), (BRIEF, "Hello, nice to see you"))
    best = 1


class TestFormat(RewardSuite):
    component = "format"
    samples = ((HALF, "1/2"), (HALF, "<answer>1/2</answer>"))
    options = {"tags": ["answer"]}
    best = 1


class TestOverlong(RewardSuite):
    component = "overlong"


class TestRepetition(RewardSuite):
    component = "repetition"


class TestRandom(RewardSuite):
    component = "random"


class TestJudge(RewardSuite):
    component = "judge"
    samples = ((HALF, "two"), (HALF, "a good one"))
    best = 1

    @classmethod
    def engine_says(cls, prompt: str) -> str:
        return "It is right.\n9" if "a good one" in prompt else "No.\n2"


class TestJudgePairs(RewardSuite):
    component = "judge-pairs"

    @classmethod
    def engine_says(cls, prompt: str) -> str:
        return "[[tie]]"


class TestRemote(RewardSuite):
    component = "remote"
    samples = ((HALF, "two"), (HALF, "1/2"))
    best = 1

    @classmethod
    def make(cls) -> Any:
        class Service(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                right = sample["response"] == sample["answer"]
                body = json.dumps({"score": float(right), "parts": {"length": len(sample["response"])}}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return Remote(RemoteOptions(url=f"http://127.0.0.1:{server.server_port}/score"))
