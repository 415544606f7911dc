"""Writes the files of nginx/ with the code of `exo-mesh nginx-config`: `python -m tools.write_nginx [--check]`."""

from __future__ import annotations

import sys

from exo_mesh.cli.balancing.writing import VARIANTS, Site, Upstream, site_text, upstream_text
from tools.checked_in import ROOT, keep_up_to_date

FOLDER = ROOT / "nginx"
EXAMPLE = [
    Upstream("192.168.1.11:52415", "studio", memory_bytes=96 << 30),
    Upstream("192.168.1.12:52415", "linux-box", memory_bytes=64 << 30),
    Upstream("192.168.1.13:52415", "old-laptop", memory_bytes=16 << 30),
]
CERTIFICATES = "/etc/letsencrypt/live/mesh.example.org"
SITES = {
    "exo-mesh.conf": Site(),
    "exo-mesh-limits.conf": Site(limit="5r/s"),
    "exo-mesh-own-keys.conf": Site(adds_keys=False),
    "exo-mesh-tls.conf": Site(
        listen="443", tls_cert=f"{CERTIFICATES}/fullchain.pem", tls_key=f"{CERTIFICATES}/privkey.pem", limit="5r/s"
    ),
}


def shipped() -> dict[str, str]:
    """Returns {name in nginx/: text}."""
    head = "# The nodes; put their addresses here, or let `exo-mesh nginx-config` write this file from the live mesh.\n"
    upstreams = {f"upstream-{variant}.conf": head + upstream_text(EXAMPLE, variant) for variant in VARIANTS}
    return upstreams | {name: site_text(site) for name, site in SITES.items()}


def main() -> int:
    return keep_up_to_date("tools.write_nginx", __doc__, FOLDER, shipped())


if __name__ == "__main__":
    sys.exit(main())
