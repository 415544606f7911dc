"""`python -m tools.settings_page [--check]` writes docs/reference/settings.md from the fields of Settings."""

from __future__ import annotations

import sys

from exo_mesh.cli.verbs.config import reference
from tools.checked_in import ROOT, keep_up_to_date

FOLDER = ROOT / "docs" / "reference"

_HEAD = """# All settings

Do not edit: `python -m tools.settings_page` writes this page from `exo_mesh/settings/config.py`, and a test compares
it. `exo-mesh config reference` prints the same tables, and `exo-mesh serve --help` has the same groups.
[Configuration](configuration.md) explains how settings are given and what some of them do.

An alias is a name that an older program gave to the setting. Most are common words that other programs set too: a value
that cannot be meant for us is passed over, where the note says so. Of two aliases of one setting the one that is listed
first wins.

"""


def pages() -> dict[str, str]:
    """The text of the page, by its name below docs/reference."""
    return {"settings.md": f"{_HEAD}{reference()}\n"}


def main() -> int:
    return keep_up_to_date("tools.settings_page", __doc__, FOLDER, pages())


if __name__ == "__main__":
    sys.exit(main())
