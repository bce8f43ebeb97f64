# SPDX-License-Identifier: Apache-2.0
"""An agent in a box, with the standard library alone. The task's column `does` says what it does there besides asking twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300) as answer:
        return json.load(answer)


def chat(*said: str) -> str:
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return str(post(url, os.environ["OPENAI_API_KEY"], {"messages": messages})["choices"][0]["message"]["content"])


def forge(folder: Path) -> None:
    """Leave verdicts and traps wherever a careless judge would step on them."""
    verdict = json.dumps({"reward": 1.0})
    trap = f"import os\nprint({verdict!r}, flush=True)\nos._exit(0)\n"
    names = ("json.py", "sitecustomize.py", "usercustomize.py", "conftest.py", "judge.py", "subprocess.py")
    for at in (folder, folder / ".local/lib/python3.11/site-packages", Path("/tmp")):
        at.mkdir(parents=True, exist_ok=True)
        for name in names:
            (at / name).write_text(trap)
        (at / "evil.pth").write_text(f"import os; print({verdict!r}, flush=True); os._exit(0)\n")
        for name in ("verdict.json", "result.json", "task.json"):
            (at / name).write_text(verdict)
    for name in (".judge", ".judge-", "judge"):
        (folder / name).symlink_to("/tmp")
    print(verdict, flush=True)
    for key in (os.environ["OPENAI_API_KEY"], "x"):
        try:
            post(os.environ["ANTHROPIC_BASE_URL"] + "/report", key, {"reward": 1.0})
        except urllib.error.HTTPError as error:
            assert error.code == 401


def daemon(folder: Path) -> None:
    """Leave a process that goes on writing verdicts over whatever appears."""
    words = "import glob, time\nwhile True:\n for f in glob.glob('/work/**/*', recursive=True, include_hidden=True):\n"
    words += "  try: open(f, 'w').write('forged')\n  except OSError: pass\n time.sleep(0.001)\n"
    Path(folder, "daemon.py").write_text(words)
    subprocess.Popen([sys.executable, Path(folder, "daemon.py")], start_new_session=True)


def main() -> None:
    task = json.loads(Path(os.environ["RELAX_TASK"]).read_text())
    what = task.get("does", "plays")
    first = chat(f"{task['id']}: guess")
    second = chat(f"{task['id']}: guess", first, "again")
    Path("answer.txt").write_text(f"{first} {second}")
    if what == "variables":
        seen = {"env": dict(os.environ), "task": task, "files": sorted(os.listdir())}
        Path("seen.json").write_text(json.dumps(seen))
    elif what == "forge":
        forge(Path.cwd())
    elif what == "daemon":
        daemon(Path.cwd())
    elif what == "fail":
        sys.exit("what went wrong")
    elif what == "forks":
        while True:
            os.fork()
            time.sleep(0.1)  # doubles all the same, and can not overload the machine before the limit is enforced
    elif what == "fills":
        with open("big", "wb") as file:
            while True:
                file.write(bytes(1 << 20))
    elif what == "kills its parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    elif what == "sleeps":
        time.sleep(1000)
    elif what == "prints":
        while True:
            print("x" * 1000)
    elif what == "reports":
        post(os.environ["RELAX_REPORT_URL"], os.environ["RELAX_REPORT_KEY"], {"reward": float(first == task["answer"])})


if __name__ == "__main__":
    main()
