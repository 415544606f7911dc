"""The tool families by name. Pure."""

from __future__ import annotations

from exo_mesh.text.output.families.arg_keys import GLM, LONGCAT
from exo_mesh.text.output.families.family import ToolFamily
from exo_mesh.text.output.families.gemma_calls import FUNCTION_GEMMA, GEMMA4
from exo_mesh.text.output.families.json_families import COMMAND, GRANITE, HERMES, LLAMA3, NEMOTRON, PHI
from exo_mesh.text.output.families.python_calls import LFM2, LLAMA4, OLMO3
from exo_mesh.text.output.families.sections import DEEPSEEK_V3, KIMI_K2, MISTRAL
from exo_mesh.text.output.families.xml_calls import DEEPSEEK_DSML, KIMI_K3, MINICPM, MINIMAX, MUSE, QWEN_CODER, SEED

FAMILIES: dict[str, ToolFamily] = {
    family.name: family
    for family in (
        *(HERMES, NEMOTRON, PHI, GRANITE, COMMAND, LLAMA3),
        *(QWEN_CODER, SEED, MINIMAX, MINICPM, DEEPSEEK_DSML, KIMI_K3, MUSE),
        *(GLM, LONGCAT, GEMMA4, FUNCTION_GEMMA, KIMI_K2, DEEPSEEK_V3, MISTRAL, LFM2, OLMO3, LLAMA4),
    )
}
