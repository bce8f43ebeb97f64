# SPDX-License-Identifier: Apache-2.0
"""A judge in a box: a point for the answer that the agent wrote down. The task's column `judge` says what else it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

key = input()
task = json.loads(Path(os.environ["RELAX_TASK"]).read_text())
work = Path(os.environ["RELAX_WORK"])
what = task.get("judge", "")
reward = float(task["answer"] in (work / "answer.txt").read_text().split())
if what == "asks what was":  # whatever runs of the agent's would rewrite it meanwhile
    time.sleep(0.5)
    reward = float(Path("expected").read_text() == "as it was" and not os.environ.get("RELAX_SOCKET"))
elif what == "runs it":  # what it starts has its output and its input
    subprocess.run([sys.executable, str(work / "judge.py")], check=False)
    sys.exit(0)
elif what == "end":
    reward = float(os.environ["RELAX_AGENT_END"] in task["answer"].split())
elif what == "quotes":
    sys.exit((work / "seen.json").read_text())
elif what == "fails":
    print(json.dumps({"reward": 1.0, "key": key}))
    sys.exit("what the judge misses")
print(json.dumps({"reward": reward, "key": key}))
