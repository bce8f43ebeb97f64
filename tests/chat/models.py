# SPDX-License-Identifier: Apache-2.0
"""Small model folders with the chat templates of several families, and their families opened."""

import json
from dataclasses import dataclass

from relax_plugin_chat.chat import ChatFamily
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.chat.tool_templates import LLAMA, MISTRAL

QWEN = """
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- if tools %}{{- '# Tools ' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}{%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
GEMMA = """
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
ONE_LINE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
GLM = """
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""


@dataclass(frozen=True)
class Shape:
    template: str
    specials: tuple[str, ...]
    bos: str
    eos: str
    ends: tuple[str, ...]
    """The ids that generation_config.json names; the first ends a turn."""
    space: str = ""
    """Text that the template puts before an assistant's words."""


SHAPES = {
    "qwen": Shape(QWEN, ("<|im_start|>", "<|im_end|>", "<|end|>"), "", "<|im_end|>", ("<|im_end|>", "<|end|>")),
    "llama": Shape(
        LLAMA, ("<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end|>"), "<|bos|>", "<|end|>",
        ("<|eot_id|>", "<|end|>"),
    ),
    "mistral": Shape(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>", ("</s>",), " "),
    "gemma": Shape(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", ("<end_of_turn>", "<eos>")
    ),
    "one-line": Shape(ONE_LINE, ("<eos>", "<bos>"), "<bos>", "<eos>", ("<eos>",)),
}  # fmt: skip


def write_model(folder, shape):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=list(shape.specials), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["help the user: 12+12=24\nassistant model cab abc\n\n"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": {"content": shape.bos}, "eos_token": shape.eos}
    if shape.bos == "":
        del tokens["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": shape.template}))
    ends = [tokenizer.token_to_id(token) for token in shape.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def open_family(folder, **model):
    family = ChatFamily()
    family.open({"path": str(folder), **model})
    return family
