# ruff: noqa: E501  calls are written on one line, as models write them
"""What models of each family write when they call tools, in our own words."""

from __future__ import annotations

import json

from tests.text.output.outputs import WEATHER, tool

NOTE = tool(
    "save-note",
    title={"type": "string"},
    body={"type": "string"},
    count={"type": "integer"},
    share={"type": "number"},
    pinned={"type": "boolean"},
    tags={"type": "array", "items": {"type": "string"}},
    meta={"type": "object"},
    either={"anyOf": [{"type": "integer"}, {"type": "string"}]},
    loose={"description": "anything"},
)
PING = tool("ping")
TOOLS = (WEATHER, NOTE, PING)

D = "｜DSML｜"


def qwen(name: str, **arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{inside}</function>"


def glm(name: str, prefix: str = "", **arguments: str) -> str:
    tags = (f"<{prefix}arg_key>{k}</{prefix}arg_key>\n<{prefix}arg_value>{v}</{prefix}arg_value>\n" for k, v in
            arguments.items())  # fmt: skip
    return f"<{prefix}tool_call>{name}\n{''.join(tags)}</{prefix}tool_call>"


def invoke(name: str, prefix: str = "", **arguments: str) -> str:
    tags = (f'<{prefix}parameter name="{k}">{v}</{prefix}parameter>\n' for k, v in arguments.items())
    return f'<{prefix}invoke name="{name}">\n{"".join(tags)}</{prefix}invoke>\n'


def minicpm(name: str, **arguments: str) -> str:
    tags = (f'<param name="{key}">{value}</param>' for key, value in arguments.items())
    return f'<function name="{name}">{"".join(tags)}</function>'


def kimi_k3(name: str, *arguments: tuple[str, str, str]) -> str:
    tags = (f'<|open|>argument key="{k}" type="{t}"<|sep|>{v}<|close|>argument<|sep|>' for k, t, v in arguments)
    return f'<|open|>call tool="{name}" index="1"<|sep|>{"".join(tags)}<|close|>call<|sep|>'


def dsml(name: str, *arguments: tuple[str, str, str]) -> str:
    tags = (f'<{D}parameter name="{k}" string="{t}">{v}</{D}parameter>\n' for k, t, v in arguments)
    return f'<{D}invoke name="{name}">\n{"".join(tags)}</{D}invoke>\n'


VALUES = {
    "title": "Grüße 🙂",
    "body": 'a "b" <c> \\n\n  def f():\n    return {1: [2]}',
    "count": "-3",
    "share": "2.5",
    "pinned": "true",
    "tags": '["x", "y]"]',
    "meta": '{"a": {"b": [1, null, "</z>"]}}',
    "loose": '{"k": 1}',
}
DEEP = json.dumps({"a": {"b": [1, -2.5e3, None, True, {"c": '"}]'}]}, "s": "Grüße 🙂 \\ \n\t <b>"})
PLAIN_JSON = ('{"city": "Rome", "days": 3}', "{}", DEEP)

CALLS: dict[str, list[str]] = {
    "hermes": [
        *(
            f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
            for arguments in PLAIN_JSON
        ),
        '<tool_call>{"arguments":{"city":"Rome"},"name":"f"}</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>',
    ],
    "qwen3_coder": [
        f"<tool_call>\n{qwen('get_weather', city='Rome', days='3')}\n</tool_call>",
        f"<tool_call>\n{qwen('save-note', **VALUES)}\n</tool_call>\n<tool_call>\n{qwen('ping')}\n</tool_call>",
        f"<tool_call>\n{qwen('save-note', loose='null', body='nullable', count='null')}\n</tool_call>",
        f"<tool_call>\n{qwen('save-note', title='', body=chr(10) * 3, pinned='FALSE', share='4.0')}\n</tool_call>",
        f"<tool_call>\n{qwen('unknown', a='1', b='x')}\n</tool_call>",
        "<tool_call>\n<function=save-note>\n<parameter=title>one line</parameter>\n</function>\n</tool_call>",
        f"<tool_call>\n{qwen('save-note', tags=chr(39).join(['[', 'a', ']']), loose='7')}\n</tool_call>",
    ],
    "glm47": [
        glm("get_weather", city="Rome", days="3"),
        glm("save-note", **VALUES) + "\n" + glm("ping"),
        glm("save-note", title=" 5 ", count="five", meta="{'a': 1}", pinned="True"),
        glm("unknown", a="1", b="x y", c="[1, 2]"),
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>',
        '<tool_call>ping\n{"a": 1}\n</tool_call>',
    ],
    "longcat": [
        glm("get_weather", "longcat_", city="Rome", days="3"),
        glm("save-note", "longcat_", **VALUES),
        '<longcat_tool_call>{"name": "ping", "arguments": {}}</longcat_tool_call>',
    ],
    "minimax_m2": [
        f"<minimax:tool_call>\n{invoke('get_weather', city='Rome', days='3')}</minimax:tool_call>",
        f"<minimax:tool_call>\n{invoke('save-note', **VALUES)}{invoke('ping')}</minimax:tool_call>",
        f"<minimax:tool_call>\n{invoke('save-note', loose=' null ', either='5', share='3.0')}</minimax:tool_call>",
        f"<minimax:tool_call>\n{invoke('save-note', either='five', pinned='yes', count='x')}</minimax:tool_call>",
        f"<minimax:tool_call>\n{invoke('unknown', a='1', b='  x  y ')}</minimax:tool_call>",
    ],
    "minicpm5": [
        minicpm("get_weather", city="Rome", days="3"),
        minicpm("save-note", title="Grüße", body="<![CDATA[ a <b>\n & c ]]>", tags='["x"]'),
        minicpm("save-note", loose="  <![CDATA[null]]>  ") + "\n" + minicpm("ping"),
    ],
    "muse_spark": [
        f"<atem:function_calls>\n{invoke('get_weather', 'atem:', city='Rome', days='3')}</atem:function_calls>",
        f"<atem:function_calls>\n{invoke('save-note', 'atem:', **VALUES)}{invoke('ping', 'atem:')}</atem:function_calls>",
    ],
    "dsml": [
        f"<{D}function_calls>\n{dsml('get_weather', ('city', 'true', 'Rome'), ('days', 'false', '3'))}</{D}function_calls>",
        f"<{D}function_calls>\n{dsml('ping')}{dsml('save-note', ('body', 'true', ' 5 '))}</{D}function_calls>",
    ],
    "kimi_k2": [
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Rome"}'
        f"<|tool_call_end|><|tool_call_begin|>functions.save-note:1<|tool_call_argument_begin|>{DEEP}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>\n<|tool_call_begin|> ping:12 <|tool_call_argument_begin|> {} <|tool_call_end|>\n"
        "<|tool_calls_section_end|>",
    ],
    "kimi_k3": [
        "<|open|>tools<|sep|>"
        + kimi_k3("get_weather", ("city", "string", "Rome"), ("days", "integer", "3"))
        + kimi_k3("save-note", ("body", "string", "null"), ("tags", "array", '["a"]'), ("k&quot;", "number", "x"))
        + "<|close|>tools<|sep|>",
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": [1]}'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ],
    "gemma4": [
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>',
        '<|tool_call>call:save-note{title:<|"|>a "b" {c}, d: [<|"|>,tags:[<|"|>x<|"|>,<|"|>y<|"|>],meta:{a:{b:1.5,c:null}},'
        "pinned:true}<tool_call|><|tool_call>call:ping{}<tool_call|>",
    ],
    "function_gemma": [
        '<start_function_call>call:get_weather{city:<escape>Rome, "x": y<escape>,days:3}<end_function_call>',
        "<start_function_call>call:note{pinned:true,word:bare,n:-1.5}<end_function_call>",
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "ping", "arguments": {}, "id": "a1"}]',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome [x]"}',
        f"[TOOL_CALLS]save-note[ARGS]{DEEP}[TOOL_CALLS]ping[ARGS]{{}}",
        '[TOOL_CALLS]ping[ARGS]{} get_weather[ARGS]{"city": "Rome"}',
        '[TOOL_CALLS] [{"name": "f", "arguments": "{\\"a\\": 1}"}]',
    ],
    "pythonic": [
        '<|tool_call_start|>[get_weather(city="Rome", days=3)]<|tool_call_end|>',
        "<|tool_call_start|>[a.b(x='it\\'s ]) ok', y=[1, {\"k\": true}], z=null), ping()]<|tool_call_end|>",
        '<|tool_call_start|>[f(x=-1.5, y="Grüße 🙂\\n")]<|tool_call_end|>',
    ],
    "olmo3": ['<function_calls>\nget_weather(city="Rome")\nping()\n</function_calls>'],
    "llama4_pythonic": ['[get_weather(city="Rome", days=3), ping()]', "<|python_start|>[ping()]<|python_end|>"],
    "llama3_json": [
        '{"name": "get_weather", "parameters": {"city": "Rome"}}',
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}; {"name": "ping", "parameters": {}}',
        '{"type": "function", "name": "ping", "parameters": {}}',
    ],
    "seed_oss": [f"<seed:tool_call>\n{qwen('get_weather', city='Rome', days='3')}\n</seed:tool_call>"],
    "granite": ['<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]'],
    "phi4": ['<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]<|/tool_call|>'],
    "nemotron": ['<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</TOOLCALL>'],
    "command": [
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Rome"}}\n]'
        "<|END_ACTION|>"
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
}
