"""`python -m tools.systemd_units [--check]` writes systemd/ from the templates of `exo-mesh service install`.

The templates in exo_mesh/cli/services/units are the one source; systemd/ has them for people who read or copy units.
"""

from __future__ import annotations

import sys
from pathlib import Path

from exo_mesh.cli.services.systemd_plan import system_plan, template
from tools.checked_in import ROOT, keep_up_to_date

FOLDER = ROOT / "systemd"
PROGRAM, RKLLAMA = Path("/opt/exo-mesh/bin/exo-mesh"), Path("/opt/rkllama/bin/rkllama_server")


def units() -> dict[str, str]:
    """Returns text by path below systemd/, for programs at the usual places."""
    plan = system_plan(PROGRAM, FOLDER, RKLLAMA)
    found = {str(file.path.relative_to("/etc/systemd/system")): file.text for file in plan.files if not file.is_own}
    return {**found, "user/exo-mesh.service": template("exo-mesh.user.service", program="%h/.local/bin/exo-mesh")}


def main() -> int:
    return keep_up_to_date("tools.systemd_units", __doc__, FOLDER, units())


if __name__ == "__main__":
    sys.exit(main())
