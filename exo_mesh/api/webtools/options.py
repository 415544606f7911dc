"""The options of the web tools."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from exo_mesh.base.small_files import read_small
from exo_mesh.settings.config import ConfigError, Settings

_MAX_KEY_CHARS = 512


@dataclass(frozen=True, slots=True)
class WebToolOptions:
    """is_on: whether the tools answer. search: "ddgs", "brave", "tavily", the base URL of a SearXNG, or "" for none.
    search_key: the key of the service. ports: allowed ports besides 80 and 443. allowed: (address, port) pairs that
    are allowed although they are not public; only tests set any. brave_url, tavily_url: base URLs of these services.
    limit_s: time limit of one call."""

    is_on: bool = False
    search: str = ""
    search_key: str = field(default="", repr=False)
    ports: frozenset[int] = frozenset()
    allowed: Set[tuple[str, int]] = frozenset()
    brave_url: str = "https://api.search.brave.com/res/v1"
    tavily_url: str = "https://api.tavily.com"
    limit_s: float = 20.0

    @property
    def names(self) -> list[str]:
        """The tools that answer, by the last part of their route."""
        searching = ["web_search"] if self.search else []
        return [*searching, "open_url", "extract_page"] if self.is_on else []

    @classmethod
    def of(cls, settings: Settings) -> WebToolOptions:
        """The options that the settings ask for. Raises ConfigError for a key that is missing or cannot be read."""
        key = _key_in(settings.web_search_key_file) if settings.web_search_key_file else ""
        if settings.web_search in ("brave", "tavily") and not key:
            message = f"--web-search {settings.web_search} needs a key: name its file with --web-search-key-file"
            raise ConfigError(message, param="web_search_key_file")
        return cls(settings.web_tools, settings.web_search, key, frozenset(settings.web_tools_ports))


def _key_in(path: Path) -> str:
    """The key in a file. Raises ConfigError, which does not quote the file."""
    try:
        key = read_small(path, _MAX_KEY_CHARS + 1).decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--web-search-key-file {path} cannot be read: {why}", param="web_search_key_file") from exc
    if not key or len(key) > _MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
        message = f"--web-search-key-file {path} does not contain a key in one line"
        raise ConfigError(message, param="web_search_key_file")
    return key
