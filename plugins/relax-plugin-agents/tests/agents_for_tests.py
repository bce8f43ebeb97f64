# SPDX-License-Identifier: Apache-2.0
"""Agents as their authors write them: functions, and a program whose first argument says what it does."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def post(url: str, key: str, body: dict[str, Any], context: str = "") -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "x-relax-context": context}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300) as answer:
        return dict(json.loads(answer.read()))


def asked(url: str, key: str, *messages: dict[str, str], context: str = "") -> str:
    body = {"model": "policy", "messages": list(messages)}
    return str(post(f"{url}/chat/completions", key, body, context)["choices"][0]["message"]["content"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def guesses(task: Any, model: Any) -> float:
    """Ask twice; a point for the answer."""
    first = asked(model.openai_url, model.key, user(f"{task.id}: guess"))
    second = asked(model.openai_url, model.key, user(f"{task.id}: guess"), assistant(first), user("again"))
    return float(task.answer in (first, second))


async def asks_side_by_side(task: Any, model: Any) -> float:
    """Two at once with equal prompts."""
    said = await asyncio.gather(
        *(asyncio.to_thread(asked, model.openai_url, model.key, user("same")) for _ in range(2))
    )
    return float(len(said))


async def plans(task: Any, model: Any) -> dict[str, float]:
    """A planner and a worker whose prompts are equal, each paid for its own part, and the sample for the whole."""
    for context in ("planner", "worker", "worker"):
        await asyncio.to_thread(asked, model.openai_url, model.key, user("same"), context=context)
    return {"planner": 0.5, "": 1.0, **({"nobody": 1.0} if task.answer == "nobody" else {})}


async def says_nothing(task: Any, model: Any) -> float:
    return 1.0


async def gives_no_number(task: Any, model: Any) -> Any:
    await asyncio.to_thread(asked, model.openai_url, model.key, user("a"))
    return {"no": None, "text": "1.0", "large": -1e308}[task.answer]


async def breaks(task: Any, model: Any) -> float:
    await asyncio.to_thread(asked, model.openai_url, model.key, user("a"))
    raise RuntimeError(f"the agent of {task.id} broke")


async def shows_what_is_refused(task: Any, model: Any) -> float:
    """The model is text only, and its template knows no system message; the text that follows is answered."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    for message, reason in (
        ({"role": "user", "content": [image]}, "the model is text only"),
        ({"role": "system", "content": "be brief"}, "knows no such role"),
    ):
        body = {"messages": [message]}
        try:
            await asyncio.to_thread(post, f"{model.openai_url}/chat/completions", model.key, body)
            return 0.0
        except urllib.error.HTTPError as refused:
            assert refused.code == 400 and reason in refused.read().decode()
    return float(await asyncio.to_thread(asked, model.openai_url, model.key, user("a")) == "yes")


async def sleeps(task: Any, model: Any) -> float:
    await asyncio.to_thread(asked, model.openai_url, model.key, user("a"))
    await asyncio.sleep(1000)
    return 1.0


async def chosen(task: Any, model: Any) -> Any:
    """Do what the task's column `does` names, so that one environment serves many tests."""
    return await globals()[task.column("does")](task, model)


def main(what: str) -> None:
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    task = json.loads(Path(os.environ["RELAX_TASK"]).read_text())
    what = task["does"] if what == "chosen" else what

    def report(reward: float) -> None:
        post(os.environ["RELAX_REPORT_URL"], os.environ["RELAX_REPORT_KEY"], {"reward": reward})

    answer = asked(url, key, user(f"{task['id']}: guess"))
    if what == "guess":
        report(float(answer == task["answer"]))
    elif what == "fail":
        print("what went wrong", file=sys.stderr)
        sys.exit(3)
    elif what == "talk":
        for _ in range(200):
            print("x" * (1 << 20))
        sys.exit(4)
    elif what == "daemon":
        words = [
            sys.executable,
            "-c",
            f"import time; open({sys.argv[2] + '/daemon'!r}, 'a').write('x'); time.sleep(1000)",
        ]
        subprocess.Popen(words, start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        report(1.0)
    elif what == "variables":
        Path(sys.argv[2], "variables").write_text(json.dumps(dict(os.environ)))
        report(1.0)
    elif what == "hang":
        time.sleep(1000)


if __name__ == "__main__":
    main(sys.argv[1])
