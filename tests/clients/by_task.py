# SPDX-License-Identifier: Apache-2.0
"""The agent of a run over all clients: each task's column `agent` names the example that plays it, with its arguments."""

import json
import os
import sys
from pathlib import Path

with open(os.environ["RELAX_TASK"], encoding="utf-8") as file:
    example, *arguments = json.load(file)["agent"]
os.execv(sys.executable, [sys.executable, str(Path(sys.argv[1], example)), *arguments])
