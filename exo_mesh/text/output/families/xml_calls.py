"""The formats with calls as tags: Qwen 3 Coder, Seed, MiniMax M2, MiniCPM 5, DeepSeek V3.2, Kimi K3, Muse. Pure."""

from __future__ import annotations

from exo_mesh.text.output.families.family import ReadCalls, ToolFamily
from exo_mesh.text.output.families.tagged import (
    Argument,
    TagStyle,
    attributes,
    bare_name,
    quoted_name,
    read_tagged_calls,
)
from exo_mesh.text.output.families.values import ANYTHING, TEXT, ValueRules
from exo_mesh.text.output.reader import More, Reader
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

_BY_QWEN = ValueRules(TEXT | {"array", "object"}, "line")
_BY_TYPES = ValueRules(TEXT, "space")
_BY_TAG = ValueRules(ANYTHING)
_MUSE_VALUES = ValueRules(ANYTHING, "space", is_quoted=True)


def _dsml_argument(header: str) -> Argument:
    found = attributes(header)
    return Argument(found.get("name", ""), found.get("string", "true") != "false")


def _kimi_argument(header: str) -> Argument:
    found = attributes(header)
    return Argument(found.get("key", ""), found.get("type", "string") == "string")


QWEN_STYLE = TagStyle(
    call_open="<function=",
    call_close="</function>",
    argument_open="<parameter=",
    argument_close="</parameter>",
    name_of=bare_name,
    argument_of=lambda header: Argument(bare_name(header)),
    rules=_BY_QWEN,
)
MINIMAX_STYLE = TagStyle(
    call_open="<invoke name=",
    call_close="</invoke>",
    argument_open="<parameter name=",
    argument_close="</parameter>",
    name_of=quoted_name,
    argument_of=lambda header: Argument(quoted_name(header)),
    rules=_BY_TYPES,
)
MINICPM_STYLE = TagStyle(
    call_open="<function name=",
    call_close="</function>",
    argument_open="<param name=",
    argument_close="</param>",
    name_of=quoted_name,
    argument_of=lambda header: Argument(quoted_name(header)),
    rules=_BY_TYPES,
    verbatim_open="<![CDATA[",
    verbatim_close="]]>",
)
DSML = "｜DSML｜"
"""DeepSeek's marker inside tags; its bars are full-width characters."""
DSML_STYLE = TagStyle(
    call_open=f"<{DSML}invoke",
    call_close=f"</{DSML}invoke>",
    argument_open=f"<{DSML}parameter",
    argument_close=f"</{DSML}parameter>",
    name_of=lambda header: attributes(header).get("name", ""),
    argument_of=_dsml_argument,
    rules=_BY_TAG,
)
KIMI_K3_STYLE = TagStyle(
    call_open="<|open|>call",
    call_close="<|close|>call<|sep|>",
    argument_open="<|open|>argument",
    argument_close="<|close|>argument<|sep|>",
    name_of=lambda header: attributes(header).get("tool", ""),
    argument_of=_kimi_argument,
    rules=_BY_TAG,
    header_end="<|sep|>",
    whole_open="<|open|>json",
    whole_close="<|close|>json<|sep|>",
)
MUSE_STYLE = TagStyle(
    call_open="<atem:invoke",
    call_close="</atem:invoke>",
    argument_open="<atem:parameter",
    argument_close="</atem:parameter>",
    name_of=lambda header: attributes(header).get("name", ""),
    argument_of=lambda header: Argument(attributes(header).get("name", "")),
    rules=_MUSE_VALUES,
)


def _reads(style: TagStyle) -> ReadCalls:
    """The reader of a style; it also reads calls that lack the marker around them."""

    def read_calls(reader: Reader, writer: EventWriter, schemas: Schemas, start: str) -> More[None]:
        yield from read_tagged_calls(reader, writer, schemas, style, is_open=start == style.call_open)

    return read_calls


def _inner(style: TagStyle) -> tuple[str, ...]:
    return (style.argument_close, style.call_close)


QWEN_CODER = ToolFamily(
    "qwen3_coder",
    ("<tool_call>", QWEN_STYLE.call_open),  # these models often forget <tool_call>
    ("</tool_call>", *_inner(QWEN_STYLE)),
    _reads(QWEN_STYLE),
)
SEED = ToolFamily(
    "seed_oss",
    ("<seed:tool_call>",),
    ("</seed:tool_call>", *_inner(QWEN_STYLE)),
    _reads(QWEN_STYLE),
)
MINIMAX = ToolFamily(
    "minimax_m2",
    ("<minimax:tool_call>",),
    ("</minimax:tool_call>", *_inner(MINIMAX_STYLE)),
    _reads(MINIMAX_STYLE),
)
MINICPM = ToolFamily("minicpm5", (MINICPM_STYLE.call_open,), _inner(MINICPM_STYLE), _reads(MINICPM_STYLE))
DEEPSEEK_DSML = ToolFamily(
    "dsml",
    (f"<{DSML}function_calls>", f"<{DSML}tool_calls>"),
    (f"</{DSML}function_calls>", f"</{DSML}tool_calls>", *_inner(DSML_STYLE)),
    _reads(DSML_STYLE),
)
KIMI_K3 = ToolFamily(
    "kimi_k3",
    ("<|open|>tools<|sep|>",),
    ("<|close|>tools<|sep|>", *_inner(KIMI_K3_STYLE)),
    _reads(KIMI_K3_STYLE),
    ends_reasoning=True,
)
MUSE = ToolFamily(
    "muse_spark",
    ("<atem:function_calls>",),
    ("</atem:function_calls>", *_inner(MUSE_STYLE)),
    _reads(MUSE_STYLE),
)
