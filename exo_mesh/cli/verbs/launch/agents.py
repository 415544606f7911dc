"""The coding agents that `exo-mesh launch` can start, and how each is configured for one run. Pure.

Each is configured by its environment, by files in a directory of the run, or by its own flags. Nothing outside of that
directory is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import PurePath

import msgspec

PROVIDER = "exo-mesh"
"""The name of the mesh in the configuration of agents that know several providers."""
COMPACT_SHARE = 0.85
"""Agents that summarise a long conversation begin when it fills this share of the context."""
_CLAUDE_LEAST_WINDOW = 100_000
"""Claude Code raises smaller values of CLAUDE_CODE_AUTO_COMPACT_WINDOW to this."""


class LaunchTarget(msgspec.Struct, frozen=True):
    """What an agent is to use. url: of the node, without a path. folder: the directory of the run, in which the files
    of the agent will be."""

    url: str
    key: str
    model: str
    context_tokens: int
    folder: PurePath

    @property
    def output_tokens(self) -> int:
        """Most tokens of one answer: a quarter of the context, but no more than agents need."""
        return max(256, min(self.context_tokens // 4, 16_384))

    @property
    def compact_tokens(self) -> int:
        """The length at which a conversation is to be summarised."""
        return int(self.context_tokens * COMPACT_SHARE)


class AgentSetup(msgspec.Struct, frozen=True):
    """environ: variables to set. unset: variables to remove, which would lead the agent elsewhere. arguments: before
    those of the user. files: texts by name, in the directory of the run."""

    environ: Mapping[str, str] = msgspec.field(default_factory=dict)
    unset: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = msgspec.field(default_factory=dict)


class Agent(msgspec.Struct, frozen=True):
    """program: the command. install: the official way to install it. needs_tokens: the context that its first request
    needs, with its instructions and tools."""

    name: str
    title: str
    program: str
    install: str
    needs_tokens: int
    setup: Callable[[LaunchTarget], AgentSetup]


def _claude(target: LaunchTarget) -> AgentSetup:
    window = max(target.context_tokens, _CLAUDE_LEAST_WINDOW)
    tiers = {f"ANTHROPIC_DEFAULT_{tier}_MODEL": target.model for tier in ("OPUS", "SONNET", "HAIKU")}
    environ = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_MODEL": target.model,
        **tiers,
        "ANTHROPIC_SMALL_FAST_MODEL": target.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.output_tokens),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(window),
        "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": str(max(1, 100 * target.compact_tokens // window)),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line that differs per conversation; it would begin each prompt
    }
    others = tuple(f"CLAUDE_CODE_USE_{cloud}" for cloud in ("BEDROCK", "VERTEX", "FOUNDRY"))
    return AgentSetup(environ, ("ANTHROPIC_API_KEY", "CLAUDE_CODE_OAUTH_TOKEN", *others))


def _codex(target: LaunchTarget) -> AgentSetup:
    settings = {
        "model": json.dumps(target.model),
        "model_provider": '"exo_mesh"',
        "model_providers.exo_mesh.name": json.dumps(PROVIDER),
        "model_providers.exo_mesh.base_url": json.dumps(f"{target.url}/v1"),
        "model_providers.exo_mesh.env_key": '"EXO_MESH_LAUNCH_KEY"',
        "model_providers.exo_mesh.wire_api": '"responses"',
        "model_context_window": str(target.context_tokens),
        "model_auto_compact_token_limit": str(target.compact_tokens),
        "web_search": '"disabled"',  # OpenAI's servers run it
        "features.multi_agent": "false",  # its tools have a type of their own
    }
    arguments = tuple(word for name, value in settings.items() for word in ("-c", f"{name}={value}"))
    return AgentSetup({"EXO_MESH_LAUNCH_KEY": target.key}, arguments=arguments)


def _opencode(target: LaunchTarget) -> AgentSetup:
    model = {"name": target.model, "limit": {"context": target.context_tokens, "output": target.output_tokens}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: model},
    }
    names = dict.fromkeys(("model", "small_model"), f"{PROVIDER}/{target.model}")
    return AgentSetup({"OPENCODE_CONFIG_CONTENT": json.dumps({**names, "provider": {PROVIDER: provider}})})


def _aider(target: LaunchTarget) -> AgentSetup:
    """aider reads the files .env of the project after the environment, and this one last."""
    name = f"openai/{target.model}"
    environ = {
        "OPENAI_API_BASE": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key,
        "AIDER_MODEL": name,
        "AIDER_WEAK_MODEL": name,
        "AIDER_EDITOR_MODEL": name,
        "AIDER_SHOW_MODEL_WARNINGS": "false",
    }
    limits = {
        "max_tokens": target.output_tokens,
        "max_input_tokens": target.context_tokens,
        "max_output_tokens": target.output_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    files = {
        "aider.env": "".join(f"{key}={value}\n" for key, value in environ.items()),
        "aider-models.json": json.dumps({name: limits}),
    }
    flags = ("--env-file", str(target.folder / "aider.env"), "--model-metadata-file",
             str(target.folder / "aider-models.json"))  # fmt: skip
    return AgentSetup(environ, arguments=flags, files=files)


def _goose(target: LaunchTarget) -> AgentSetup:
    environ = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": target.model,
        "GOOSE_CONTEXT_LIMIT": str(target.context_tokens),
        "GOOSE_MAX_TOKENS": str(target.output_tokens),
        "OPENAI_HOST": target.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": target.key,
    }
    return AgentSetup(environ, ("OPENAI_BASE_URL", "GOOSE_LEAD_MODEL", "GOOSE_LEAD_PROVIDER"))


def _qwen(target: LaunchTarget) -> AgentSetup:
    environ = {"OPENAI_BASE_URL": f"{target.url}/v1", "OPENAI_API_KEY": target.key, "OPENAI_MODEL": target.model}
    return AgentSetup(environ, arguments=("--auth-type", "openai", "--model", target.model))


def _continue(target: LaunchTarget) -> AgentSetup:
    """Its configuration is written as JSON, which is valid YAML."""
    model = {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": f"{target.url}/v1",
        "apiKey": target.key,
        "roles": ["chat", "edit", "apply"],
        "defaultCompletionOptions": {"contextLength": target.context_tokens, "maxTokens": target.output_tokens},
    }
    config = {"name": PROVIDER, "version": "0.0.1", "schema": "v1", "models": [model]}
    path = str(target.folder / "continue.yaml")
    return AgentSetup(arguments=("--config", path), files={"continue.yaml": json.dumps(config)})


def _crush(target: LaunchTarget) -> AgentSetup:
    model = {
        "id": target.model,
        "name": target.model,
        "context_window": target.context_tokens,
        "default_max_tokens": target.output_tokens,
    }
    provider = {
        "name": PROVIDER,
        "type": "openai-compat",
        "base_url": f"{target.url}/v1",
        "api_key": target.key,
        "models": [model],
    }
    chosen = {"model": target.model, "provider": PROVIDER}
    config = {"providers": {PROVIDER: provider}, "models": {"large": chosen, "small": chosen}}
    return AgentSetup({"CRUSH_GLOBAL_CONFIG": str(target.folder)}, files={"crush.json": json.dumps(config)})


AGENTS: Mapping[str, Agent] = {
    agent.name: agent
    for agent in (
        Agent("claude", "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", 32_000, _claude),
        Agent("codex", "Codex", "codex", "npm install -g @openai/codex", 16_000, _codex),
        Agent("opencode", "opencode", "opencode", "npm install -g opencode-ai", 16_000, _opencode),
        Agent("aider", "aider", "aider", "python -m pip install aider-chat", 4_000, _aider),
        Agent("qwen", "Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", 32_000, _qwen),
        Agent("continue", "Continue", "cn", "npm install -g @continuedev/cli", 12_000, _continue),
        Agent("goose", "goose", "goose", "see https://block.github.io/goose", 16_000, _goose),
        Agent("crush", "Crush", "crush", "npm install -g @charmland/crush", 16_000, _crush),
    )
}
