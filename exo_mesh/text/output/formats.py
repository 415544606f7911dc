"""The formats in which models mark reasoning and tool calls, and how to detect a model's format. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.grammars import lark_of
from exo_mesh.text.json_schema import SchemaError
from exo_mesh.text.output.families.table import FAMILIES
from exo_mesh.text.output.harmony import HARMONY_MARKERS
from exo_mesh.text.output.lark_rules import LarkRules
from exo_mesh.text.output.tool_grammars import BUILDERS, WHOLE_MESSAGES
from exo_mesh.text.output.tools import Tool
from exo_mesh.text.output.value_grammars import UnenforceableError

_PARTS = re.compile(r"<\|\w+\|>")
"""Matches each token of a marker that consists of several tokens."""


class OutputFormat(msgspec.Struct, frozen=True):
    """How a model marks its reasoning and tool calls. An empty string: the model does not reason, or calls no tools."""

    name: str
    reasoning_start: str = ""
    reasoning_end: str = ""
    tool_family: str = ""
    """A name of FAMILIES, or "harmony"."""
    reasoning_label: str = ""
    """A word after the start marker that belongs to the marker."""
    dropped: tuple[str, ...] = ()
    """Other markers to drop, such as those around the answer itself."""
    tokens: tuple[tuple[str, int | None], ...] = ()
    """The markers that are one token each, with their token ids; None if the id is unknown."""

    @property
    def is_harmony(self) -> bool:
        """Whether an answer consists of messages with headers, as gpt-oss writes it."""
        return self.name == "harmony"

    def markers(self, *, has_tools: bool) -> frozenset[str]:
        """Tokens that the detokenizer must decode as text, even if they are special, because the parser needs them."""
        if self.is_harmony:
            return frozenset(HARMONY_MARKERS)
        family = FAMILIES.get(self.tool_family) if has_tools else None
        found = {self.reasoning_start, self.reasoning_end, *self.dropped, *(family.markers if family else ())}
        return frozenset(found | {part for marker in found for part in _PARTS.findall(marker)} - {""})


GAP = r"/[ \n]{0,2}/"
"""White space between reasoning and answer. It is bounded, because a poor model would write white space without end."""

PLAIN = OutputFormat("plain")
HARMONY = OutputFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>", "harmony")


class _Thought(msgspec.Struct, frozen=True):
    """The markers around reasoning, and those around the answer itself (dropped)."""

    start: str
    end: str
    label: str = ""
    dropped: tuple[str, ...] = ()


_THOUGHTS = (
    _Thought("<think>", "</think>", dropped=("<answer>", "</answer>", "<response>", "</response>")),
    _Thought("[THINK]", "[/THINK]"),
    _Thought("<seed:think>", "</seed:think>", dropped=("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")),
    _Thought("<longcat_think>", "</longcat_think>"),
    _Thought("<|think:start|>", "<|think:end|>"),
    _Thought("<|channel>", "<channel|>", "thought"),
    _Thought("<|START_THINKING|>", "<|END_THINKING|>", dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    _Thought("<|inner_prefix|>", "<|inner_suffix|>"),
)
KIMI_K3_FORMAT = OutputFormat(
    "kimi_k3",
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    "kimi_k3",
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
_KIMI_K3_TOKENS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

# (sign, family), the most certain signs first. A sign is a text in the template or an added token.
_TOOL_SIGNS: tuple[tuple[str, str], ...] = (
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "function_gemma"),
    ("<longcat_tool_call>", "longcat"),
    ("<seed:tool_call>", "seed_oss"),
    ("｜DSML｜", "dsml"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<atem:function_calls>", "muse_spark"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<arg_key>", "glm47"),
    ("<|tool_call_start|>", "pythonic"),
    ("<|tool_list_start|>", "pythonic"),
    ("<tool_call>\\n<function=", "qwen3_coder"),
    ("<tool_call>\n<function=", "qwen3_coder"),
    ('<function name="', "minicpm5"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|START_ACTION|>", "command"),
    ("<TOOLCALL>", "nemotron"),
    ("<|/tool_call|>", "phi4"),
    ("<|tool_call|>", "granite"),
    ("<function_calls>", "olmo3"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "llama4_pythonic"),
    ("[func_name1(", "llama4_pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)
_TOKENS_THAT_SAY_IT = frozenset({"pythonic", "gemma4", "minimax_m2", "kimi_k2", "dsml"})
"""Families that their tool tokens alone identify, because those tokens have no other use."""


def format_of(template_source: str | None, architecture: str, special_tokens: Collection[str]) -> OutputFormat:
    """Detect the format of a model.

    special_tokens: the tokens that its tokenizer adds to the vocabulary. With a mapping to their ids, grammars can also
    use tokens such as [TOOL_CALLS]. The template decides first, because it shows what the model was trained on; then
    the architecture, then the tokens.
    """
    found = _format_of(template_source or "", architecture, special_tokens)
    ids = special_tokens if isinstance(special_tokens, Mapping) else dict.fromkeys(special_tokens)
    tokens = sorted(found.markers(has_tools=True) & ids.keys())
    return replace(found, tokens=tuple((token, ids[token]) for token in tokens))


def _format_of(source: str, architecture: str, special_tokens: Collection[str]) -> OutputFormat:
    if architecture == "gpt_oss" or ("<|channel|>" in source and "<|message|>" in source):
        return HARMONY
    if all(token in special_tokens for token in _KIMI_K3_TOKENS):
        return KIMI_K3_FORMAT
    thought = _thought_of(source, architecture, special_tokens)
    family = _family_of(source, architecture, special_tokens)
    name = family or ("thinks" if thought.start else "plain")
    return OutputFormat(name, thought.start, thought.end, family, thought.label, thought.dropped)


def _thought_of(source: str, architecture: str, tokens: Collection[str]) -> _Thought:
    if architecture.startswith("gemma4"):
        return next(thought for thought in _THOUGHTS if thought.label)
    for seen in (source, tokens):
        found = [thought for thought in _THOUGHTS if thought.end in seen]
        if found:
            words = [marker.replace("/", "") for marker in found[0].dropped]
            pairs = zip(found[0].dropped, words, strict=True)
            dropped = tuple(marker for marker, word in pairs if word in source or marker in source or marker in tokens)
            return replace(found[0], dropped=dropped)
    return _Thought("", "")


def _family_of(source: str, architecture: str, tokens: Collection[str]) -> str:
    found = next((family for sign, family in _TOOL_SIGNS if sign in source), "")
    if not found and architecture.startswith("gemma4"):
        return "gemma4"
    if not found and architecture == "deepseek_v32":
        return "dsml"
    by_token = (family for sign, family in _TOOL_SIGNS if sign in tokens and family in _TOKENS_THAT_SAY_IT)
    return found or next(by_token, "")


def prompt_starts_reasoning(output: OutputFormat, prompt: str) -> bool:
    """Whether the prompt ends inside reasoning, because the template has already written the start marker."""
    start = output.reasoning_start + output.reasoning_label
    return bool(start) and prompt.rstrip().endswith(start)


def opened_reasoning(output: OutputFormat, prompt: str) -> str:
    """The prompt of an answer, with the start marker of reasoning. Raises InputError if the template has ended the
    reasoning, because thinking is off."""
    if prompt_starts_reasoning(output, prompt):
        return prompt
    if prompt.rstrip().endswith(output.reasoning_end):
        raise InputError(
            "the last message ends in its reasoning, and thinking is off, so it cannot be continued; turn thinking on",
            param="continue_final_message",
        )
    return f"{prompt}{output.reasoning_start}{output.reasoning_label}" + ("" if output.is_harmony else "\n")


def tool_grammar(output: OutputFormat, tools: Sequence[Tool], choice: str, parallel: bool) -> GrammarSpec | None:
    """A grammar that enforces tool calls in the family's format; None if the choice does not force a call, or if nobody
    knows the format. choice: "none", "auto", "required", or the name of a tool, which is then called once. Raises
    InputError if the schema of a tool cannot be enforced."""
    builder = BUILDERS.get(output.tool_family)
    if choice in ("none", "auto") or builder is None:
        return None
    wanted = tools if choice == "required" else [tool for tool in tools if tool.name == choice]
    if not wanted:
        return None
    rules = LarkRules(output.tokens)
    try:
        return rules.grammar(builder(rules, wanted, parallel and choice == "required"))
    except SchemaError as exc:
        raise UnenforceableError(str(exc)) from exc
    except RecursionError as exc:
        raise UnenforceableError("its deep nesting") from exc
    except (TypeError, AttributeError, KeyError) as exc:
        raise InputError("a keyword in the schema of a tool has a value of the wrong type") from exc


def as_answer(output: OutputFormat, spec: GrammarSpec) -> GrammarSpec:
    """Add this format's header of an answer to the grammar of the answer's text, so that it can be an alternative to
    the grammar of calls."""
    if not output.is_harmony:
        return spec
    rules = LarkRules(output.tokens)
    rules.note(WHOLE_MESSAGES)
    kind = f'(" " {rules.literal("<|constrain|>json")})?'
    return rules.grammar(f"{rules.literal('<|channel|>final')} {kind} {rules.literal('<|message|>')} {lark_of(spec)}")


def after_reasoning(
    output: OutputFormat, spec: GrammarSpec, starts_in_reasoning: bool, *, may_think: bool = True
) -> GrammarSpec:
    """Extend the grammar of an answer or of calls so that the model may reason first, without constraints. may_think:
    if false, it may not; reasoning that the prompt has begun ends at once."""
    rules = LarkRules(output.tokens)
    if output.is_harmony:
        whole = spec if WHOLE_MESSAGES in spec.text else as_answer(output, spec)
        if not may_think:
            return whole
        head = rules.literal("<|channel|>analysis<|message|>")
        thought = f"{head} {rules.text_until('<|end|>')} {rules.literal('<|start|>assistant')}"
        return rules.grammar(f"({thought})? {lark_of(whole)}")
    if not output.reasoning_start or not (may_think or starts_in_reasoning):
        return spec
    end = rules.text_until(output.reasoning_end) if may_think else f"{GAP} {rules.literal(output.reasoning_end)}"
    thought = f"{end} {rules.rule(GAP)}"
    if not starts_in_reasoning:
        thought = f"({rules.literal(output.reasoning_start)} {thought})?"
    return rules.grammar(f"{thought} {lark_of(spec)}")
