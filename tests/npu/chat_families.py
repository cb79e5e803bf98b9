"""Chat templates in the style of each family of models, and conversations to put through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CONVERSATIONS", "FAMILIES", "TOOLS", "Conversation", "Family"]


@dataclass(frozen=True)
class Family:
    """A family's template and the control tokens it writes.

    Attributes:
        name: for test ids.
        template: for conversations without tools, or for all.
        control: control tokens, bos first and eos second.
        tool_use: a template of its own for conversations with tools.
        turn_end: what ends an assistant's turn.
    """

    name: str
    template: str
    control: tuple[str, ...]
    turn_end: str
    tool_use: str | None = None


CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {{- message['content'] | default('', true) | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call functions. Their signatures:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nAnswer with <tool_call>{\\"name\\": ..., \\"arguments\\": ...}</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
           and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n' if not loop.first or content }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA_3 = """\
{{- bos_token }}
{%- macro text_of(content) %}
    {%- if content is string %}{{- content | trim }}
    {%- else %}{%- for part in content or [] %}{{- part.text | trim }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = text_of(messages[0]['content']) %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- if documents %}{%- for d in documents %}{{- d.title ~ ': ' ~ d.text ~ '\\n' }}{%- endfor %}{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content | tojson if message.content is mapping else text_of(message.content) }}{{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + text_of(message['content']) }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

SMOLLM_3 = """\
{%- set thinking = true if enable_thinking is not defined else enable_thinking -%}
{%- set instructions = '' -%}
{%- if messages[0].role == 'system' -%}
    {%- set instructions = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() -%}
    {%- if '/no_think' in messages[0].content -%}{%- set thinking = false -%}{%- endif -%}
{%- endif -%}
{{- '<|im_start|>system\\n## Metadata\\n\\nReasoning Mode: ' ~ ('/think' if thinking else '/no_think') ~ '\\n\\n' -}}
{{- instructions ~ '\\n' -}}
{%- if tools -%}
    {{- '### Tools\\n' -}}
    {%- for tool in tools -%}{{- (tool.function if tool.function else tool) | string ~ '\\n' -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' -%}
        {% generation %}{{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}{% endgeneration %}
    {%- elif message.role == 'tool' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' }}{%- if not thinking -%}{{ '<think>\\n\\n</think>\\n' }}{%- endif -%}
{%- endif -%}"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

INST = """\
{{- bos_token }}
{%- set turns = messages | rejectattr('role', 'equalto', 'system') | list %}
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\\n') %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') + message.content + '[/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}"""

INST_TOOLS = """\
{{- bos_token }}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- for message in messages %}
    {%- if message.role in ('user', 'system') %}{{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- '[TOOL_CALLS]' + (message.tool_calls | map(attribute='function') | list | tojson) + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + {'content': message.content} | tojson + '[/TOOL_RESULTS]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}"""

_IM = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
FAMILIES = (
    Family("chatml", CHATML, _IM, "<|im_end|>"),
    Family("qwen", QWEN, _IM, "<|im_end|>"),
    Family("smollm3", SMOLLM_3, _IM, "<|im_end|>"),
    Family(
        "llama-3",
        LLAMA_3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    Family("zephyr", ZEPHYR, ("<s>", "</s>"), "</s>"),
    Family(
        "inst",
        INST,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        "</s>",
        tool_use=INST_TOOLS,
    ),
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read_sensor",
            "description": "Reads a machine's sensor <now>.",
            "parameters": {
                "type": "object",
                "properties": {"machine": {"type": "string"}, "count": {"type": "integer", "default": 3}},
                "required": ["machine"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "Hält an.", "parameters": {"type": "object"}}},
]


@dataclass(frozen=True)
class Conversation:
    """Messages, and what else `apply_chat_template` is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    prompt: bool = True
    documents: list[dict[str, Any]] | None = None
    variables: dict[str, Any] | None = None


def _say(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    return {"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


_SYSTEM = _say("system", "You help at a lathe.")
_HOT = _say("user", "Why does a bearing run hot?")
_GREASE = _say("assistant", "Too much grease, or too little.")
_ASKS = _say("assistant", None, tool_calls=[_call("read_sensor", {"machine": "Fräse 7", "count": 2, "x": None})])
_TELLS = _say("tool", '{"temp": 81.5}', tool_call_id="call0", name="read_sensor")

CONVERSATIONS = (
    Conversation([_HOT]),
    Conversation([_HOT], prompt=False),
    Conversation([_SYSTEM, _HOT]),
    Conversation([_SYSTEM, _HOT, _GREASE, _say("user", "How much?")]),
    Conversation([_HOT, _GREASE], prompt=False),
    Conversation([_say("user", "  white\n space \t\n")]),
    Conversation([_say("user", "Öl 🙂 主轴 e\u0301 \u200d <b>&amp;'\"</b> {{ x }} {% y %}")]),
    Conversation([_say("user", "")]),
    Conversation([_HOT, _say("assistant", "<think>\nhm\n</think>\n\nGrease."), _say("user", "Sure?")]),
    Conversation([_HOT, _say("assistant", "Grease.", reasoning_content="Let me see.")], prompt=False),
    Conversation([_HOT, _say("assistant", "Grease.", reasoning="Well.", tool_calls=None)], prompt=False),
    Conversation([_say("system", "Be short. /no_think"), _HOT], variables={"enable_thinking": False}),
    Conversation([_HOT], variables={"enable_thinking": True}),
    Conversation([_HOT], tools=TOOLS),
    Conversation([_SYSTEM, _HOT], tools=TOOLS[:1]),
    Conversation([_HOT, _ASKS, _TELLS], tools=TOOLS),
    Conversation([_SYSTEM, _HOT, _ASKS, _TELLS, _GREASE, _say("user", "Stop it.")], tools=TOOLS),
    Conversation(
        [
            _HOT,
            _say("assistant", "", tool_calls=[_call("read_sensor", {"machine": "A"}), _call("stop", {}, 1)]),
            _TELLS,
            _TELLS,
        ],
        tools=TOOLS,
    ),
    Conversation([_HOT, _ASKS, _TELLS, _GREASE], tools=[]),
    Conversation([_SYSTEM, _HOT], documents=[{"title": "Manual", "text": "Grease monthly."}]),
    Conversation([_say("user", [{"type": "text", "text": "What"}, {"type": "text", "text": "is it?"}])]),
    Conversation([_SYSTEM, _say("user", [{"type": "text", "text": "Hm"}]), _GREASE, _say("user", "And?")]),
    Conversation([_SYSTEM, _GREASE, _HOT]),
    Conversation([_say("developer", "Be kind."), _HOT]),
)
