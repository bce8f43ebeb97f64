# SPDX-License-Identifier: Apache-2.0
"""The HTTP dialects in which clients call the policy: one module with pure translations for each dialect."""

from __future__ import annotations

from relax_plugin_agents.dialects.chat import ChatCompletions
from relax_plugin_agents.dialects.messages import AnthropicMessages
from relax_plugin_agents.dialects.responses import Responses
from relax_plugin_agents.model_request import Dialect

DIALECTS: tuple[type[Dialect], ...] = (ChatCompletions, Responses, AnthropicMessages)
