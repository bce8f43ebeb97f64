# SPDX-License-Identifier: Apache-2.0
"""Chat templates of common families, written after their published ones: the branches that join turns are complete."""

from __future__ import annotations

from tests.chat.models import GEMMA
from tests.chat.tool_templates import BAR, HARMONY, HERMES, LLAMA, MISTRAL, PHI

QWEN3 = """
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
    {{- '\\n<tool_call>\\n{"name": <function-name>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set tool_call = tool_call.function %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nOPENING' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
DEEPSEEK_R1 = """
{%- set ns = namespace(is_tool=false, is_output_first=true) %}{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}{%- endif %}
    {%- if message.role == 'user' %}{%- set ns.is_tool = false %}{{- '<|User|>' + message.content }}{%- endif %}
    {%- if message.role == 'assistant' and message.content is none %}
        {{- '<|Assistant|><|tool▁calls▁begin|>' }}
        {%- for tool in message.tool_calls %}
            {{- '' if loop.first else '\\n' }}
            {{- '<|tool▁call▁begin|>' + tool.type + '<|tool▁sep|>' + tool.function.name + '\\n```json\\n' }}
            {{- tool.function.arguments + '\\n```<|tool▁call▁end|>' }}
        {%- endfor %}{{- '<|tool▁calls▁end|><|end▁of▁sentence|>' }}
    {%- endif %}
    {%- if message.role == 'assistant' and message.content is not none %}
        {%- if ns.is_tool %}
            {{- '<|tool▁outputs▁end|>' + message.content + '<|end▁of▁sentence|>' }}{%- set ns.is_tool = false %}
        {%- else %}
            {%- set content = message.content.split('</think>')[-1] if '</think>' in message.content else message.content %}
            {{- '<|Assistant|>' + content + '<|end▁of▁sentence|>' }}
        {%- endif %}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '\\n' if ns.is_tool else '<|tool▁outputs▁begin|>' }}{%- set ns.is_tool = true %}
        {{- '<|tool▁output▁begin|>' + message.content + '<|tool▁output▁end|>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<|tool▁outputs▁end|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
""".replace("<|", f"<{BAR}").replace("|>", f"{BAR}>")

FAMILIES = {
    "qwen2.5": (HERMES, "<|im_end|>"),
    "qwen3": (QWEN3.replace("OPENING", ""), "<|im_end|>"),
    "qwen3-thinking": (QWEN3.replace("OPENING", "<think>\\n"), "<|im_end|>"),
    "llama3": (LLAMA, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>"),
    "deepseek-r1": (DEEPSEEK_R1, f"<{BAR}end▁of▁sentence{BAR}>"),
    "phi": (PHI, "<|end|>"),
    "gpt-oss": (HARMONY, "<|return|>"),
}
"""By name: the template, and the token that ends a turn."""
