"""Chat templates for models whose files have none: DeepSeek V3.2, which comes with a program instead, and Gemma 4.

They run like a model's own template, in the renderer's process. The wording for DeepSeek is what the model was trained
on, as of `encoding_dsv32.py` in its repository (MIT licence).
"""

from __future__ import annotations

from exo_mesh.text.template import ChatTemplate

_DSML_TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
"""  # noqa: E501

DSML_TEMPLATE = (
    """
{%- set thinks = thinking if thinking is defined else (enable_thinking if enable_thinking is defined else true) -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' or message.role == 'developer' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro tools_text() -%}
{{- '\\n\\n"""
    + _DSML_TOOLS.replace("'", "\\'").replace("\n", "\\n")
    + """' -}}
{%- for tool in tools -%}{{- tool.function | tojson + ('' if loop.last else '\\n') -}}{%- endfor -%}
{{- '\\n</functions>\\n' -}}
{%- endmacro -%}
{{- '<｜begin▁of▁sentence｜>' -}}
{%- if tools and messages[0].role != 'system' -%}{{- tools_text() -}}{%- endif -%}
{%- for message in messages -%}
{%- set opening = '<think>' if thinks and loop.index0 >= ns.last_user else '</think>' -%}
{%- if message.role == 'system' -%}
{{- message.content or '' -}}
{%- if tools and loop.first -%}{{- tools_text() -}}{%- endif -%}
{%- elif message.role == 'user' or message.role == 'developer' -%}
{{- '<｜User｜>' + message.content -}}
{%- if not loop.last or add_generation_prompt -%}{{- '<｜Assistant｜>' + opening -}}{%- endif -%}
{%- elif message.role == 'tool' -%}
{%- if not loop.first and messages[loop.index0 - 1].role != 'tool' -%}{{- '\\n\\n<function_results>' -}}{%- endif -%}
{{- '\\n<result>' + message.content + '</result>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '\\n</function_results>' -}}
{%- if not loop.last or add_generation_prompt -%}{{- '\\n\\n' + opening -}}{%- endif -%}
{%- endif -%}
{%- elif message.role == 'assistant' -%}
{%- if thinks and loop.index0 > ns.last_user -%}{{- (message.reasoning_content or '') + '</think>' -}}{%- endif -%}
{{- message.content or '' -}}
{%- if message.tool_calls -%}
{{- '\\n\\n<｜DSML｜function_calls>\\n' -}}
{%- for call in message.tool_calls -%}
{{- '<｜DSML｜invoke name="' + call.function.name + '">\\n' -}}
{%- for name, value in call.function.arguments.items() -%}
{{- '<｜DSML｜parameter name="' + name + '" string="' + ('true' if value is string else 'false') + '">' -}}
{{- (value if value is string else value | tojson) + '</｜DSML｜parameter>' + ('' if loop.last else '\\n') -}}
{%- endfor -%}
{{- '\\n</｜DSML｜invoke>' + ('' if loop.last else '\\n') -}}
{%- endfor -%}
{{- '\\n</｜DSML｜function_calls>' -}}
{%- endif -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
"""
)

GEMMA4_TEMPLATE = """
{%- set thinks = enable_thinking if enable_thinking is defined else false -%}
{%- macro written(value, name='') -%}
{%- if value is mapping -%}
{{- '{' -}}{%- for key, item in value | dictsort -%}
{{- key + ':' -}}{{- written(item, key) -}}{{- '' if loop.last else ',' -}}
{%- endfor -%}{{- '}' -}}
{%- elif value is string -%}{{- '<|"|>' + (value | upper if name == 'type' else value) + '<|"|>' -}}
{%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
{%- elif value is none -%}{{- 'null' -}}
{%- elif value is sequence -%}
{{- '[' -}}{%- for item in value -%}{{- written(item) -}}{{- '' if loop.last else ',' -}}{%- endfor -%}{{- ']' -}}
{%- else -%}{{- value -}}
{%- endif -%}
{%- endmacro -%}
{%- macro arguments(value) -%}
{{- '{' -}}{%- for key, item in value | dictsort -%}
{{- key + ':' -}}{{- written(item) -}}{{- '' if loop.last else ',' -}}
{%- endfor -%}{{- '}' -}}
{%- endmacro -%}
{%- set ns = namespace(is_open=false) -%}
{{- '<bos>' -}}
{%- set has_system = messages[0].role == 'system' or messages[0].role == 'developer' -%}
{%- if has_system or thinks or tools -%}
{{- '<|turn>system\\n' -}}
{%- if thinks -%}{{- '<|think|>\\n' -}}{%- endif -%}
{%- if has_system -%}{{- messages[0].content | trim -}}{%- endif -%}
{%- for tool in tools or [] -%}
{{- '<|tool>declaration:' + tool.function.name + '{description:<|"|>' + tool.function.description + '<|"|>' -}}
{%- if tool.function.parameters -%}{{- ',parameters:' -}}{{- written(tool.function.parameters) -}}{%- endif -%}
{{- '}<tool|>' -}}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- if not ns.is_open -%}{{- '<|turn>model\\n' -}}{%- endif -%}
{%- set ns.is_open = true if message.tool_calls else false -%}
{{- (message.content or '') | trim -}}
{%- for call in message.tool_calls or [] -%}
{{- '<|tool_call>call:' + call.function.name -}}{{- arguments(call.function.arguments) -}}{{- '<tool_call|>' -}}
{%- endfor -%}
{%- if not ns.is_open -%}{{- '<turn|>\\n' -}}{%- endif -%}
{%- elif message.role == 'tool' -%}
{%- set found = namespace(name='tool') -%}
{%- for other in messages -%}{%- for call in other.tool_calls or [] -%}
{%- if call.id == message.tool_call_id -%}{%- set found.name = call.function.name -%}{%- endif -%}
{%- endfor -%}{%- endfor -%}
{{- '<|tool_response>response:' + found.name + '{value:<|"|>' + message.content + '<|"|>}<tool_response|>' -}}
{%- elif not loop.first or not has_system -%}
{%- if ns.is_open -%}{{- '<turn|>\\n' -}}{%- set ns.is_open = false -%}{%- endif -%}
{{- '<|turn>' + ('user' if message.role == 'user' else 'system') + '\\n' + message.content | trim + '<turn|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if not ns.is_open -%}{{- '<|turn>model\\n' -}}{%- endif -%}
{%- if not thinks -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}
{%- endif -%}
"""


def built_in_template(architecture: str) -> ChatTemplate | None:
    """The built-in template for an architecture whose models may have none; None for all other architectures."""
    if architecture == "deepseek_v32":
        return ChatTemplate.found(DSML_TEMPLATE, "the built-in template of DeepSeek V3.2")
    if architecture.startswith("gemma4"):
        return ChatTemplate.found(GEMMA4_TEMPLATE, "the built-in template of Gemma 4")
    return None
