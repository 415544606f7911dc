"""Check this machine: what a node needs, what peers need to reach it, and what a node that runs here reports.

Takes the flags of a node and checks what a node with these settings would use. Changes nothing. Exit code 1 if a check
fails; warnings do not count. `exo-mesh doctor rdma` checks only RDMA over Thunderbolt.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.doctor.checks import Finding, Severity
from exo_mesh.cli.doctor.diagnosis import ask_node, checks_for, diagnose, rdma_checks, version_findings
from exo_mesh.cli.parser import add_api_flags, add_node_flags, node_flags
from exo_mesh.cli.tables import print_json, say
from exo_mesh.settings.config import LoadedSettings
from exo_mesh.settings.loading import load_settings

CHECK_DEADLINE_S = 10.0
"""Deadline of each check. Most take less than a second; one may hang, for example on a dead network drive."""

RDMA_DEADLINE_S = 60.0
"""Longer, because `doctor rdma` runs six macOS tools in sequence and imports MLX in a separate process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `rdma`, `--json`, `--api-url`, and the settings of a node."""
    parser.add_argument(
        "about", nargs="?", choices=("rdma",), help="check only RDMA over Thunderbolt: cables, ports, what is missing"
    )
    add_api_flags(parser, home=False)
    add_node_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Runs all checks in parallel and prints the findings."""
    flags = node_flags(args)
    loaded = load_settings(flags, os.environ)
    url = args.api_url or os.environ.get("EXO_MESH_API_URL") or own_url(loaded)
    certificate = loaded.settings.tls_cert if "tls_cert" in flags else None
    node = ask_node(ApiClient(url, flags["home"][-1] if "home" in flags else None, certificate))
    try:
        work = rdma_checks(loaded, node) if args.about == "rdma" else checks_for(loaded, node)
        findings = diagnose(work, RDMA_DEADLINE_S if args.about == "rdma" else CHECK_DEADLINE_S)
    except ImportError as exc:  # a library of the package is missing, so the other checks cannot run either
        findings = [*version_findings(), Finding("versions", Severity.FAIL, str(exc), "pip install exo-mesh")]
    failed = any(finding.level is Severity.FAIL for finding in findings)
    if args.json:
        print_json({"ok": not failed, "findings": [_as_json(finding) for finding in findings]})
    else:
        say(report(findings))
    return exit_codes.FAILED if failed else exit_codes.OK


def own_url(loaded: LoadedSettings) -> str:
    """The URL at which a node with these settings answers on this machine."""
    host = loaded.settings.host
    here = "127.0.0.1" if host in ("0.0.0.0", "::", "[::]") else host
    here = f"[{here}]" if ":" in here and not here.startswith("[") else here
    scheme = "https" if loaded.settings.tls_cert else "http"
    return f"{scheme}://{here}:{loaded.settings.api_port or 52415}"


def report(findings: Sequence[Finding]) -> str:
    """The findings as text: a line each with the remedy below it, and the counts."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:4}  {finding.check:9}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':15}  -> {finding.remedy}")
    failed, warned = (sum(f.level is level for f in findings) for level in (Severity.FAIL, Severity.WARN))
    return "\n".join([*lines, "", f"{failed} failed, {warned} warnings"])


def _as_json(finding: Finding) -> dict[str, str]:
    return {"check": finding.check, "level": finding.level, "finding": finding.text, "remedy": finding.remedy}
