# SPDX-License-Identifier: Apache-2.0
"""mini-swe-agent, whose only tool is a shell: `python mini_swe_agent.py openai`, or `anthropic`.

The shell runs as this process's user, in a temporary directory. Run the agent in a sandbox if you do not trust the
policy.
"""

import os
import sys
import tempfile

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", tempfile.mkdtemp(prefix="mswea-"))
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise litellm downloads the cost map at import
from calculator_task import MODEL, PROMPT, TURNS, report
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name=f"{sys.argv[1]}/{MODEL}",
    cost_tracking="ignore_errors",
    model_kwargs={"api_base": os.environ[f"{sys.argv[1].upper()}_BASE_URL"]},
)
agent = DefaultAgent(
    model,
    LocalEnvironment(cwd=tempfile.mkdtemp(prefix="shell-"), timeout=20),
    system_template="You work in a shell. Print COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT, then the answer, when you have it.",
    instance_template="{{ task }}",
    step_limit=TURNS,
)
report(agent.run(PROMPT).get("submission"))
