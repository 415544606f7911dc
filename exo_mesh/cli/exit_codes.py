"""Exit codes of every verb; docs/reference/cli.md has the same table."""

from exo_mesh.errors import MeshError

OK = 0
FAILED = 1
"""The command failed; one line on standard error says why."""
USAGE = 2
"""A flag, a variable or config.toml is wrong, or a needed package is not installed."""
NO_NODE = 3
"""No node answers at the API address."""
ADDRESS_IN_USE = 4
"""A port that the user named is taken."""
INTERRUPTED = 130
"""Interrupted by Ctrl-C (128 + SIGINT)."""

MEANINGS = {
    OK: "done",
    FAILED: "failed; one line on standard error says why",
    USAGE: "a flag, variable or `config.toml` is wrong, or a needed package is not installed",
    NO_NODE: "no node answers at the API address",
    ADDRESS_IN_USE: "a port that was named explicitly is taken",
    INTERRUPTED: "interrupted with Ctrl-C",
}

_BY_ERROR = {"bad_setting": USAGE, "no_node": NO_NODE, "address_in_use": ADDRESS_IN_USE}


def of_error(error: MeshError) -> int:
    """The exit code after an error.

    The class of the error decides, not its code: an error that a node reported can carry any code.
    """
    return _BY_ERROR.get(type(error).code, FAILED)
