"""`python -m tools.dashboards` writes the dashboards of monitoring/; with --check it only compares them."""

from __future__ import annotations

import sys

from tools.checked_in import ROOT, keep_up_to_date
from tools.dashboards.catalogue import BOARDS
from tools.dashboards.render import to_json

FOLDER = ROOT / "monitoring" / "grafana" / "dashboards"


def main() -> int:
    files = {f"{board.name}.json": to_json(board) for board in BOARDS}
    return keep_up_to_date("tools.dashboards", __doc__, FOLDER, files)


if __name__ == "__main__":
    sys.exit(main())
