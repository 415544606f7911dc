"""Conversations in chat form, with tools and thoughts, as token ids with the places where loss is taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from tools.demo_model.example import Example
from tools.demo_model.tasks import TOOL_WEIGHTS, draw_beside_tools, draw_mixed, draw_training_call
from tools.demo_model.thoughts import thought_of
from tools.demo_model.tokenizer import TURN_END
from tools.demo_model.tool_tasks import THOUGHT_OF_RESULT
from tools.demo_model.tools_known import DECOY, KnownTool, draw_kit, list_tools
from tools.demo_model.word_lists import ENGLISH

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly and helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are helpful.",
    "Be brief.",
    "Be brief and kind.",
    "You are exo-mesh-demo, a tiny model.",
    "You are a chat bot. Be polite and answer in one sentence.",
    "Answer the question of the user.",
)
TOOLS_SHARE, CALLING, THINKING = 0.42, 0.74, 0.22
"""Shares: of conversations with tools; of their questions that a call answers; of answers with a thought."""
Encoded = tuple[list[int], list[bool]]  # token ids, and for each id whether the model must predict it


@dataclass(frozen=True)
class Said:
    """One message of the assistant: the new text before it, and its own text."""

    before: str
    text: str
    thought: str
    given: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Conversation:
    """A system message, the tools offered, the questions, and whether the model is asked to think."""

    system: str | None
    turns: list[Example]
    kit: tuple[KnownTool, ...] = ()
    thinking: bool = False

    def with_schema_apart(self, rng: Random) -> Conversation:
        """Returns the same conversation; a schema at the start of the first question may move to the system message."""
        first = self.turns[0]
        if "\n\n" not in first.prompt or rng.random() < 0.4:
            return self
        schema, prompt = first.prompt.rsplit("\n\n", 1)
        return replace(self, system=schema, turns=[replace(first, prompt=prompt), *self.turns[1:]])


def user_turn(text: str) -> str:
    """Returns a message of the user, and the start of the assistant's."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def system_turn(system: str | None, kit: tuple[KnownTool, ...] = ()) -> str:
    """Returns the system message with the list of tools; empty without either."""
    parts = ([] if system is None else [system]) + ([list_tools(kit)] if kit else [])
    return "<|im_start|>system\n" + "\n\n".join(parts) + "<|im_end|>\n" if parts else ""


def said_in(turns: list[Example], system: str | None, kit: tuple[KnownTool, ...] = ()) -> list[Said]:
    """Returns all messages of the assistant: an answer for each question, and one more after the results of tools."""
    said, before = [], system_turn(system, kit)
    for turn in turns:
        said.append(Said(before + user_turn(turn.prompt), turn.answer, thought_of(turn), turn.given))
        before = "\n"
        if turn.results:
            results = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in turn.results)
            said.append(Said("\n" + user_turn(results.removeprefix("\n")), turn.final, THOUGHT_OF_RESULT))
    return said


def chat_prompt(
    prompt: str, system: str | None = None, earlier: tuple[Example, ...] = (), kit: tuple[KnownTool, ...] = ()
) -> str:
    """Returns the chat text up to the place where the assistant answers `prompt`."""
    last = Example("", "other", "", prompt, "")
    *past, here = said_in([*earlier, last], system, kit)
    return "".join(said.before + said.text + TURN_END for said in past) + here.before


def encode_answer(tokenizer: Tokenizer, context: str, answer: str, given: tuple[tuple[int, int], ...] = ()) -> Encoded:
    """Encodes `context` followed by `answer` and the end of the turn; loss on the latter two, except on given parts."""
    before = tokenizer.encode(context).ids
    after = tokenizer.encode(answer + TURN_END)
    learned = [not any(start <= at < end for start, end in given) for at, _ in after.offsets]
    return before + after.ids, [False] * len(before) + learned


def encode_conversation(tokenizer: Tokenizer, conversation: Conversation, only_last: bool = False) -> Encoded:
    """Encodes a whole conversation; loss on every answer and the end of its turn, or on the last one only.

    With thinking, only the last answer has its thought, because the template omits earlier thoughts.
    """
    ids: list[int] = []
    marks: list[bool] = []
    said = said_in(conversation.turns, conversation.system, conversation.kit)
    for i, message in enumerate(said):
        context, answer, given = message.before, message.text, message.given
        if conversation.thinking and i == len(said) - 1:
            thought = message.thought + "\n</think>\n\n"
            context, answer = context + "<think>\n", thought + answer
            given = tuple((start + len(thought), end + len(thought)) for start, end in given)
        more_ids, more_marks = encode_answer(tokenizer, context, answer, given)
        ids += more_ids
        marks += more_marks if i == len(said) - 1 or not only_last else [False] * len(more_ids)
    return ids, marks


def draw_system(rng: Random) -> str | None:
    """Draws a system message (about one time in five), sometimes one without information for the model."""
    roll = rng.random()
    if roll < 0.17:
        return rng.choice(SYSTEM_MESSAGES)
    if roll < 0.21:
        words = [rng.choice(ENGLISH) for _ in range(rng.randint(3, 30))]
        return " ".join(words).capitalize() + "."
    return None


def draw_context(rng: Random, weights: dict[str, float] | None = None) -> Conversation:
    """Draws a conversation of one to three questions; with tools mostly questions that call them."""
    system, thinking = draw_system(rng), rng.random() < THINKING
    turns = rng.choices((1, 2, 3), (0.66, 0.22, 0.12))[0]
    if rng.random() >= TOOLS_SHARE:
        drawn = [draw_mixed(rng, weights) for _ in range(turns)]
        return Conversation(system, drawn, thinking=thinking).with_schema_apart(rng)
    family = rng.choices(tuple(TOOL_WEIGHTS), tuple(TOOL_WEIGHTS.values()))[0]
    kit = draw_kit(rng, family if rng.random() < 0.9 else DECOY)
    able = [tool for tool in kit if tool.family != DECOY]
    drawn = [
        draw_training_call(rng.choice(able), rng)
        if able and rng.random() < CALLING
        else draw_beside_tools(kit, rng, weights)
        for _ in range(min(turns, 2))
    ]
    if thinking and rng.random() < 0.6:  # the thought before a call must be learned too
        drawn[-1] = replace(drawn[-1], results=())
    return Conversation(system, drawn, kit, thinking)
