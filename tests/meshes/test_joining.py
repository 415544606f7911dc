"""Real processes: a machine joins a closed mesh by a code, and is a member from then on."""

from __future__ import annotations

import re
import signal
import stat
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.security.secret import new_secret, write_new
from exo_mesh.settings.config import SECRET_FILE_NAME
from tests.support.peers import MODEL, Peer, mesh, start_node
from tests.support.processes import eventually, read_until, run, start

ENGINE = "dummy"


@pytest.mark.extended
def test_a_machine_joins_by_a_code_and_is_a_member(tmp_path: Path) -> None:
    secret = new_secret()
    write_new(tmp_path / "mesh.secret", secret)
    laptop = tmp_path / "laptop"
    with mesh(tmp_path, [["--secret-file", str(tmp_path / "mesh.secret")]], engine=ENGINE) as (studio,):
        abandoned = start(["invite", "--api-url", studio.url], tmp_path / "peer-0")
        read_until(abandoned, "exo-mesh join")
        abandoned.send_signal(signal.SIGINT)
        abandoned.communicate(timeout=10)
        assert abandoned.returncode == exit_codes.INTERRUPTED
        assert studio.api.get("/v1/invite")["state"] == "withdrawn"

        inviting = start(["invite", "--api-url", studio.url], tmp_path / "peer-0")
        code = re.search(r"exo-mesh join (\S+)", read_until(inviting, "exo-mesh join"))
        assert code is not None
        wrong = run(["join", re.sub("[^/]+$", "aaaa-bbbb-cccc", code[1])], laptop)
        assert (wrong.returncode, wrong.stdout) == (exit_codes.FAILED, "") and "4 tries are left" in wrong.stderr

        joined = run(["join", code[1], "--home", str(laptop)], tmp_path / "third")
        assert joined.returncode == exit_codes.OK, joined.stderr
        assert f"start `exo-mesh --home {laptop}`" in joined.stderr
        said, _ = inviting.communicate(timeout=10)
        assert inviting.returncode == exit_codes.OK and "has joined" in said
        stored = laptop / SECRET_FILE_NAME
        assert stored.read_text().strip() == secret and stat.S_IMODE(stored.stat().st_mode) == 0o600
        assert secret not in joined.stdout + joined.stderr + said + studio.log

        again = run(["join", code[1]], tmp_path / "third")
        assert again.returncode == exit_codes.FAILED and "it was used" in again.stderr
        twice = run(["join", code[1]], laptop)
        assert twice.returncode == exit_codes.USAGE and "has a secret already" in twice.stderr

        child = start_node(laptop, ["--bootstrap-peers", studio.grpc_address], engine=ENGINE)
        try:
            member = Peer(child, child.wait_ready(60))
            assert eventually(lambda: studio.knows({studio.id, member.id}, MODEL), 15), child.log_tail(30)
            assert member.api.get("/health")["mesh"] == "closed"
        finally:
            child.stop()


def test_join_refuses_before_it_calls_anybody(tmp_path: Path) -> None:
    for argv, said in [
        (["join", "192.168.1.5:52415/abc"], "not a code"),
        (["join", "abcd-efgh-jkmn"], "--peer"),
    ]:
        done = run(argv, tmp_path)
        assert done.returncode in (exit_codes.USAGE, exit_codes.FAILED) and said in done.stderr
        assert done.stderr.count("\n") == 1
