"""Writes systemd/ from the templates of `exo-mesh service install`: python -m tools.systemd_units

The templates in exo_mesh/services/units are the one source; systemd/ has them for people who read or copy units.
"""

from __future__ import annotations

from pathlib import Path

from exo_mesh.services.systemd_plan import system_plan, template

ROOT = Path(__file__).resolve().parents[1] / "systemd"
PROGRAM, RKLLAMA = Path("/opt/exo-mesh/bin/exo-mesh"), Path("/opt/rkllama/bin/rkllama_server")


def units() -> dict[str, str]:
    """Text by path below systemd/, for programs at the usual places."""
    plan = system_plan(PROGRAM, ROOT, RKLLAMA)
    found = {str(file.path.relative_to("/etc/systemd/system")): file.text for file in plan.files if not file.is_own}
    return {**found, "user/exo-mesh.service": template("exo-mesh.user.service", program="%h/.local/bin/exo-mesh")}


if __name__ == "__main__":
    for name, text in units().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT.parent))
