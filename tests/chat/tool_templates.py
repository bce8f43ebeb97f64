# SPDX-License-Identifier: Apache-2.0
"""Small chat templates in the shape of each family's own: how it shows tools, calls and answers of tools."""

from __future__ import annotations

import json
from importlib import resources

from relax_plugin_chat.chat import ChatFamily
from relax_plugin_chat.tool_calls import call_format
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from relax_core.api.environment import Tool

CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}"
    "{{- 'Answer with FORMAT<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}CALLS{{- '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def chatml(shown: str, calls: str) -> str:
    return CHATML.replace("FORMAT", shown).replace("CALLS", "{%- if message.tool_calls %}" + calls + "{%- endif %}")


HERMES = chatml(
    '<tool_call>{"name": <name>, "arguments": <object>}</tool_call>',
    """{%- for call in message.tool_calls %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
    {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}""",
)
AGENTS = (resources.files("relax_plugin_agents") / "tools.jinja").read_text()
"""The template that the agents' plugin brings."""
QWEN3_CODER = chatml(
    "<tool_call>\\n<function=example>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>",
    """{%- for call in message.tool_calls %}{%- set call = call.function %}
    {{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
    {%- for key, value in call.arguments | items %}
        {{- '<parameter=' + key + '>\\n' }}
        {%- set value = value | tojson if value is mapping or (value is sequence and value is not string) else value | string %}
        {{- value + '\\n</parameter>\\n' }}
    {%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}""",
)
GLM = """[gMASK]<sop>
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{% endif -%}
{% for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{{ m.content }}
{%- for tc in m.tool_calls or [] %}{% set tc = tc.function %}
{{ '\\n<tool_call>' + tc.name }}
{% for k, v in tc.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson(ensure_ascii=False) }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>{% endif -%}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if thinking %}{{ '\n<think>' }}{% endif %}{% endif %}"""
LLAMA = """{{- bos_token }}
{%- if tools %}{{- 'Environment: ipython\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {%- for t in tools %}{{- t | tojson }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '<|python_tag|>' if ipython is defined else '' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL_BEGIN = """{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.tool_calls is defined) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
"""
MISTRAL_END = """
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
    {%- else %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL = (
    MISTRAL_BEGIN
    + """{{- '[TOOL_CALLS] [' }}
    {%- for call in message.tool_calls %}
        {%- set out = call.function | tojson %}
        {%- if call.id | length != 9 %}{{- raise_exception('length 9!') }}{%- endif %}
        {{- out[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
    {%- endfor %}{{- ']' + eos_token }}"""
    + MISTRAL_END
)
MISTRAL_ARGS = (
    MISTRAL_BEGIN
    + """{{- message.content }}{%- for call in message.tool_calls %}
        {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}
    {%- endfor %}{{- eos_token }}"""
    + MISTRAL_END
)
BAR = "\N{FULLWIDTH VERTICAL LINE}"
DEEPSEEK_V3 = """{{ bos_token }}{%- if tools %}
{{- '<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>NAME' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content + '<|Assistant|>' }}
    {%- elif message.role == 'assistant' %}{{- message.content }}
        {%- if message.tool_calls %}{{- '<|tool▁calls▁begin|>' }}
            {%- for tool in message.tool_calls %}
                {{- '' if loop.first else '\\n' }}
                {{- '<|tool▁call▁begin|>' + tool.type + '<|tool▁sep|>' + tool.function.name + '\\n```json\\n' }}
                {{- tool.function.arguments + '\\n```<|tool▁call▁end|>' }}
            {%- endfor %}{{- '<|tool▁calls▁end|>' }}
        {%- endif %}{{- eos_token }}
    {%- else %}{{- '<|tool▁output▁begin|>' + message.content + '<|tool▁output▁end|>' }}{%- endif %}
{%- endfor %}
""".replace("<|", f"<{BAR}").replace("|>", f"{BAR}>")
DEEPSEEK_V31 = (
    DEEPSEEK_V3.replace("tool.type + ", "")
    .replace(
        f"'<{BAR}tool▁sep{BAR}>' + tool.function.name + '\\n```json\\n'", f"tool.function.name + '<{BAR}tool▁sep{BAR}>'"
    )
    .replace("'\\n```", "'")
)
DEEPSEEK_R1 = DEEPSEEK_V3.replace("{{- message.content }}", "{{- message.content or '' }}").replace(
    "{%- if message.tool_calls %}", "{%- if message.content is none %}"
)
"""Shows calls only of a turn without words."""
KIMI = """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
    {%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' }}{%- endif %}
    {{- message.content }}
    {%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '<|tool_call_end|>' }}
        {%- endfor %}{{- '<|tool_calls_section_end|>' }}
    {%- endif %}{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""
PHI = """
{%- if tools %}{{- '<|system|>functools[{"name": name, "arguments": object}]' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{- '<|end|>' }}{%- endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}
    {%- if message.tool_calls %}{{- 'functools[' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson + ('' if loop.last else ', ') }}{%- endfor %}{{- ']' }}
    {%- endif %}{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
PYTHONIC = """{{- bos_token }}
{%- if tools %}{{- 'Use [func_name1(param1=value1, param2=value2), func_name2(...)]' }}{%- for t in tools %}{{- t | tojson }}
{%- endfor %}{%- endif %}
{%- for message in messages %}
    {{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' + message.content }}
    {%- if message.tool_calls %}{{- '[' }}
        {%- for call in message.tool_calls %}{{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments | items %}
                {{- key + '=' + value | pprint + ('' if loop.last else ', ') }}
            {%- endfor %}{{- ')' + ('' if loop.last else ', ') }}
        {%- endfor %}{{- ']' }}
    {%- endif %}{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}
"""
HARMONY = """
{%- set last = namespace(name=none) %}
{{- '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|># Tools\n\nnamespace functions {\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '}<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- elif message.content %}
            {{- '<|start|>assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
        {%- for call in message.tool_calls %}{%- set call = call.function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson + '<|call|>' }}
            {%- set last.name = call.name %}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {%- if message.thinking and loop.last and not add_generation_prompt %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- set last.name = none %}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{- raise_exception('no assistant message with a tool call before') }}{%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
TEMPLATES = {
    "hermes": ("hermes", AGENTS, "<|im_end|>"),
    "qwen3-coder": ("qwen3-coder", QWEN3_CODER, "<|im_end|>"),
    "glm": ("glm", GLM, "<|observation|>"),
    "llama": ("llama", LLAMA, "<|eot_id|>"),
    "llama-ipython": ("llama", "{%- set ipython = true %}" + LLAMA, "<|eot_id|>"),
    "mistral": ("mistral", MISTRAL, "</s>"),
    "mistral-args": ("mistral", MISTRAL_ARGS, "</s>"),
    "deepseek-v3": ("deepseek", DEEPSEEK_V3, f"<{BAR}end▁of▁sentence{BAR}>"),
    "deepseek-v3.1": ("deepseek", DEEPSEEK_V31, f"<{BAR}end▁of▁sentence{BAR}>"),
    "deepseek-r1": ("deepseek", DEEPSEEK_R1, f"<{BAR}end▁of▁sentence{BAR}>"),
    "kimi": ("kimi", KIMI, "<|im_end|>"),
    "phi": ("phi", PHI, "<|end|>"),
    "pythonic": ("pythonic", PYTHONIC, "<|eot|>"),
    "harmony": ("harmony", HARMONY, "<|return|>"),
}
"""By name: the format, the template, and the token that ends a turn."""
KINDS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "on": {"type": "boolean"},
    "items": {"type": "array", "items": {}},
    "table": {"$ref": "#/$defs/Table"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
SCHEMA = {"type": "object", "properties": KINDS, "required": [], "$defs": {"Table": {"type": "object"}}}
TOOLS = (Tool("search", SCHEMA), Tool("find_all", SCHEMA))


CALL = {
    "hermes": '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=search>\n</function>\n</tool_call>",
    "glm": "<tool_call>search\n</tool_call>",
    "llama": '<|python_tag|>{"name": "search", "parameters": {}}',
    "mistral": "[TOOL_CALLS]search[ARGS]{}",
    "deepseek": f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>search<{BAR}tool▁sep{BAR}>{{}}"
    f"<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "phi": 'functools[{"name": "search", "arguments": {}}]',
    "pythonic": "<|python_start|>[search()]<|python_end|>",
    "harmony": "<|channel|>commentary to=functions.search <|constrain|>json<|message|>{}<|call|>",
}


def open_family(folder, template, end, special=(), **model):
    """A model whose marks are special tokens, so that they vanish from what is decoded without them."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={one: place for place, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    shown = call_format(model.get("tool_calls", "auto"), template)
    tokenizer.add_special_tokens(["<s>", end, *(special or ((*shown.opens, *shown.marks) if shown else ()))])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": end}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(end)}))
    (folder / "chat_template.jinja").write_text(template)
    family = ChatFamily()
    family.open({"path": str(folder), **model})
    return family
