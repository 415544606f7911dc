"""Where the lines of a process go, and how that changes while it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from exo_mesh.base.telemetry.start_phases import StartPhases

PROGRAM = """
import logging, sys
from pathlib import Path
from exo_mesh.base.telemetry.line_writer import RotatingFile
from exo_mesh.base.telemetry.logs import current_request, current_trace
from exo_mesh.base.telemetry.node_logs import NodeLogs
logs = NodeLogs("console", "info", RotatingFile(Path(sys.argv[1]), 10**6, 2))
log = logging.getLogger("exo_mesh.test")
log.info("for people")
log.debug("not yet")
logs.follow("both", "info")
current_request.set("req_1"), current_trace.set("ab" * 16)
log.info("for both")
current_request.set(""), current_trace.set("")
logs.follow("json", "warning")
log.info("not any more")
logs.set_own("debug")
log.debug("of this node alone")
logs.follow("json", "error")
assert logs.level == "debug"
logs.set_own(None)
log.warning("not any more")
log.error("for programs")
logs.event('{"event": "stopping"}')
logging.shutdown()
assert logs.describe()["lost_lines"] == {"stdout": 0, "stderr": 0, "file": 0}
"""


def test_people_read_stderr_programs_stdout_and_all_of_it_changes_at_run_time(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "node.jsonl"
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    people = [line[9:] for line in done.stderr.splitlines()]
    assert people[0] == "for people" and people[2].startswith("for both trace_id=abab")
    assert "request_id=req_1" in people[2]
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert printed[-1] == {"event": "stopping"}
    in_file = [json.loads(line) for line in path.read_text().splitlines()]
    said = [line["message"] for line in in_file if "changed the log to level" not in line["message"]]
    assert said == ["for people", "for both", "of this node alone", "for programs"]
    both = next(line for line in printed if line.get("message") == "for both")
    assert (both["request_id"], both["trace_id"]) == ("req_1", "ab" * 16)
    assert [line["message"] for line in printed[:-1]] == [line["message"] for line in in_file[1:]]


def test_the_phases_of_a_start_add_up() -> None:
    now = [10.0]
    phases = StartPhases(lambda: now[0])
    for name, took in (("settings", 0.25), ("engines", 1.5), ("API", 0.05)):
        now[0] += took
        phases.done(name)
    assert str(phases) == "settings 0.25, engines 1.50, API 0.05"
    assert round(phases.total_s, 6) == 1.8
