# SPDX-License-Identifier: Apache-2.0
"""The judge: prints reward 1 if every module in the agent's repository passes the hidden cases, else 0.

The judge runs in the agent's box after the agent has ended. The modules run in a separate process that never gets the
expected values.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

CALLS = """\
import json, sys
values = []
for name, a, b in json.load(sys.stdin):
    space = {}
    exec(open(sys.argv[1] + "/" + name + ".py").read(), space)
    values.append(space[name](a, b))
print(json.dumps(values))
"""


def main() -> None:
    key = input()
    with open("cases.json", encoding="utf-8") as file:
        cases = json.load(file)
    command = [sys.executable, "-I", "-S", "-c", CALLS, os.environ["RELAX_WORK"]]
    given = json.dumps([case[:-1] for case in cases])
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=10, check=False)
        right = json.loads(done.stdout) == [case[-1] for case in cases]
    except (subprocess.TimeoutExpired, ValueError):
        right = False
    print(json.dumps({"reward": float(right), "key": key}))


if __name__ == "__main__":
    main()
