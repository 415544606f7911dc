"""Small chat templates, each with a habit of a family of models."""

from __future__ import annotations

from exo_mesh.text.built_in_templates import DSML_TEMPLATE, GEMMA4_TEMPLATE
from tests.text.text_models import TEMPLATE

_OPEN, _CLOSE = "<|im_start|>", "<|im_end|>\n"
_ANSWER = f"{{% if add_generation_prompt %}}{_OPEN}assistant\n{{% endif %}}"


def chatml(body: str) -> str:
    """A template that writes each message as ChatML; `body` writes what is inside."""
    start = f"{{% for message in messages %}}{_OPEN}{{{{ message.role }}}}\n"
    return start + body + f"{_CLOSE}{{% endfor %}}{_ANSWER}"


CALLS = (
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments ARGUMENTS }}}</tool_call>{% endfor %}"
)
FIRST_CALL = CALLS.replace("ARGUMENTS", "| tojson").replace(
    "message.tool_calls or []", "(message.tool_calls or [])[:1]"
)
TURNS = (
    "{% for message in messages %}{% if message.role in ('user', 'assistant') %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"

ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
GEMMA2 = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + ALTERNATING

MISTRAL = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    + TOOLS
    + "{% for message in rest %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids of calls have nine characters') }}{% endif %}[RESULT]{{ message.content }}"
    "{% elif message.role == 'assistant' %}{% for call in message.tool_calls or [] %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}"
    "[TOOL_CALLS]{{ call.function | tojson }}[{{ call.id }}]{% endfor %}{{ message.content }}</s>"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)

TEMPLATES: dict[str, str] = {
    "chatml": TEMPLATE,
    "trims": chatml("{{ message.content | trim }}"),
    "parts": chatml("{% for part in message.content %}{% if part['type'] == 'text' %}{{ part['text'] }}"
                    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}"),
    "parts of the user": chatml("{% if message.role == 'user' %}{{ message.content[0].text }}{% else %}"
                                "{{ message.content }}{% endif %}"),
    "no system": GEMMA2,
    "hides system": chatml("{{ message.content if message.role != 'system' }}"),
    "hides late system": "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
                         "{% for message in messages %}{% if message.role == 'user' %}USER {{ message.content }}\n"
                         "{% elif message.role == 'assistant' %}ASSISTANT {{ message.content }}\n{% endif %}"
                         "{% endfor %}{% if add_generation_prompt %}ASSISTANT {% endif %}",
    "tools": TOOLS + chatml("{{ message.content }}" + CALLS.replace("ARGUMENTS", "| tojson")),
    "text arguments": TOOLS + chatml("{{ message.content }}" + CALLS.replace("ARGUMENTS", "+ ''")),
    "prints arguments": TOOLS + chatml("{{ message.content }}" + CALLS.replace("ARGUMENTS", "")),
    "calls stand alone": TOOLS + "{% for message in messages %}{% if message.content is none %}"
                         + CALLS.replace("ARGUMENTS", "+ ''")
                         + "{% else %}<|im_start|>{{ message.role + '\\n' + message.content }}<|im_end|>\n{% endif %}"
                         "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "refuses both": TOOLS + chatml("{% if message.tool_calls and message.thinking and message.content %}"
                                   "{{ raise_exception('text or thoughts') }}{% endif %}{{ message.thinking }}"
                                   "{{ message.content }}" + CALLS.replace("ARGUMENTS", "| tojson")),
    "tools beside system": chatml("{{ message.content }}{% if message.role == 'system' %}" + TOOLS + "{% endif %}"
                                  + CALLS.replace("ARGUMENTS", "| tojson")),
    "short ids": MISTRAL,
    "needs names": TOOLS + chatml("{% if message.role == 'tool' %}{{ message.name + ': ' }}{% endif %}"
                                  "{{ message.content }}" + CALLS.replace("ARGUMENTS", "| tojson")),
    "thinks": chatml("{% if message.thinking %}<think>{{ message.thinking }}</think>{% endif %}"
                     "{{ message.content.split('</think>')[-1] }}"),
    "developer": chatml("{% if message.role == 'developer' %}# Instructions\n{% endif %}{{ message.content }}"),
    "always opens": TEMPLATE.replace("{% if add_generation_prompt %}", "{% if true %}"),
    "echoes": "{% if messages | length > 9 %}…{% endif %}" + TEMPLATE + "{{ messages[0].content[:0] }}",
    "first call": TOOLS + chatml("{{ message.content }}" + FIRST_CALL),
    "one call": TOOLS + chatml("{% if message.tool_calls and message.tool_calls | length > 1 %}"
                               "{{ raise_exception('one call at a time') }}{% endif %}{{ message.content }}"
                               + FIRST_CALL),
    "calls or text": TOOLS + chatml("{% if message.tool_calls %}" + CALLS.replace("ARGUMENTS", "| tojson")
                                    + "{% else %}{{ message.content }}{% endif %}"),
    "last system": "{% set found = namespace(system='') %}{% for message in messages %}"
                   "{% if message.role == 'system' %}{% set found.system = message.content %}"
                   "{% endif %}{% endfor %}{{ found.system }}" + TURNS,
    "first instructions": "{% if messages[0].role in ('system', 'developer') %}# Instructions\n"
                          "{{ messages[0].content }}\n{% endif %}" + TURNS,
    "no short ids": MISTRAL.replace("!= 9", "< 9"),
    "loops over tools": TOOLS.replace("{% if tools %}", "").removesuffix("{% endif %}")
                        + chatml("{{ message.content }}" + CALLS.replace("ARGUMENTS", "| tojson")),
    "deepseek v3.2": DSML_TEMPLATE,
    "gemma 4": GEMMA4_TEMPLATE,
}  # fmt: skip
