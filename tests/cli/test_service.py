"""`exo-mesh service`: what it writes and runs, and whether systemd and launchd's format like it."""

from __future__ import annotations

import os
import plistlib
import pwd
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.main import main
from exo_mesh.cli.services.launchd_plan import START, agent_plan, daemon_plan, print_state
from exo_mesh.cli.services.program import obstacle, require_readable
from exo_mesh.cli.services.systemd_plan import command_word, state_line, system_plan, user_plan
from exo_mesh.cli.services.waiting import wait_for_port
from exo_mesh.settings.config import ConfigError
from tests.support.real_systemd import RealSystemd, real_systemd, why_not
from tools import systemd_units

UNITS = systemd_units.FOLDER
PROGRAM = systemd_units.PROGRAM
HARDENED = ["exo-mesh.service", "exo-mesh-sleep.service", "user/exo-mesh.service"]
has_systemctl = pytest.mark.skipif(not shutil.which("systemctl"), reason="systemctl is not installed")
has_analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


def install(root: Path, *flags: str) -> int:
    return main(["service", "install", "--root", str(root), "--program", str(PROGRAM), *flags])


# the units


def test_the_units_in_systemd_are_what_the_verb_writes() -> None:
    found = [path for path in UNITS.rglob("*") if path.is_file() and path.suffix != ".md"]
    there = {str(path.relative_to(UNITS)): path.read_text() for path in found}
    assert there == systemd_units.units(), "run python -m tools.systemd_units"


def verify(folder: Path, scope: str, *units: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "verify", "--recursive-errors=yes", "--man=no", f"--{scope}"]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "SYSTEMD_UNIT_PATH": f"{folder}:"}
    paths = [str(folder / unit) for unit in units]
    return subprocess.run([*command, *paths], capture_output=True, text=True, check=False, timeout=60, env=environ)


@has_analyze
@pytest.mark.parametrize("scope", ["system", pytest.param("user", marks=pytest.mark.extended)])
def test_systemd_finds_nothing_to_complain_about(tmp_path: Path, scope: str) -> None:
    program = tmp_path / "exo mesh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    if scope == "system":
        plan = system_plan(program, tmp_path, program)
        folder, names = Path("/etc/systemd/system"), HARDENED[:2]
    else:
        plan = user_plan(program, Path("/config"), Path("/data"), can_sandbox=False)
        folder, names = Path("/config/systemd/user"), ["exo-mesh.service"]
    for file in plan.files:
        if not file.is_own:
            path = tmp_path / file.path.relative_to(folder)
            path.parent.mkdir(exist_ok=True)
            path.write_text(file.text)
    checked = verify(tmp_path, scope, *names)
    assert (checked.returncode, "exo-mesh" in checked.stderr) == (0, False), checked.stderr
    # the same call finds what is wrong: without --recursive-errors it exits 0 on such a unit
    bad = tmp_path / "exo-mesh.service"
    bad.write_text(bad.read_text().replace("Restart=on-failure", "Restart=sometimes"))
    assert verify(tmp_path, scope, "exo-mesh.service").returncode != 0


@has_analyze
@pytest.mark.parametrize("name", HARDENED)
def test_a_service_that_is_broken_into_can_do_little(name: str) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", str(UNITS / name)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stdout[-200:]


@pytest.mark.parametrize("name", ["exo-mesh.service", "user/exo-mesh.service"])
def test_the_units_agree_with_the_program(name: str) -> None:
    text = (UNITS / name).read_text()
    lines = text.splitlines()
    wanted = {
        "Type=notify", "WatchdogSec=30", "TimeoutStopSec=45", "Restart=on-failure", "RestartSec=10", "KillMode=mixed",
        "StartLimitIntervalSec=300", "StartLimitBurst=5", "LimitNOFILE=65536", "UMask=0077",
        "SystemCallFilter=@system-service", "SystemCallFilter=~@privileged",
    }  # fmt: skip
    assert wanted <= set(lines)
    assert re.search(r"^EnvironmentFile=-/etc/default/exo-mesh$|^EnvironmentFile=-%E/", text, re.MULTILINE)
    assert re.search(r"^ExecStart=\S+/exo-mesh serve --log-format json$", text, re.MULTILINE)
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)
    assert prevented is not None
    assert set(map(int, prevented[1].split())) == {exit_codes.USAGE, exit_codes.ADDRESS_IN_USE}


def test_a_path_is_one_word_of_a_unit() -> None:
    assert command_word("/opt/x/exo-mesh") == "/opt/x/exo-mesh"
    assert command_word("/opt/my 100%/exo-mesh") == '"/opt/my 100%%/exo-mesh"'


# the verb, below another root


@has_systemctl
def test_it_installs_into_an_image_and_again_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(tmp_path) == 0
    unit = tmp_path / "etc/systemd/system/exo-mesh.service"
    assert unit.read_text() == (UNITS / "exo-mesh.service").read_text()
    assert (tmp_path / "etc/systemd/system/multi-user.target.wants/exo-mesh.service").is_symlink()
    settings = tmp_path / "etc/default/exo-mesh"
    assert settings.stat().st_mode & 0o777 == 0o600
    settings.write_text("EXO_MESH_NAME=mine\n")
    unit.write_text("of an older version")
    capsys.readouterr()
    assert install(tmp_path) == 0
    said = capsys.readouterr().out
    assert f"wrote: {unit}" in said
    assert f"kept: {settings}" in said
    assert settings.read_text() == "EXO_MESH_NAME=mine\n"
    assert install(tmp_path) == 0
    assert f"unchanged: {unit}" in capsys.readouterr().out
    place = ["--root", str(tmp_path), "--program", str(PROGRAM)]
    assert main(["service", "status", *place]) == 0
    assert main(["service", "uninstall", *place]) == 0
    assert not unit.exists()
    assert settings.exists()
    assert main(["service", "status", *place]) == 1


def test_a_dry_run_prints_files_and_commands_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(tmp_path, "--dry-run") == 0
    said = capsys.readouterr().out
    assert (UNITS / "exo-mesh.service").read_text() in said
    assert f"$ systemctl --root={tmp_path} enable exo-mesh.service exo-mesh-sleep.service" in said
    assert list(tmp_path.iterdir()) == []


@has_systemctl
def test_the_node_starts_after_rkllama_where_there_is_one(tmp_path: Path) -> None:
    drop_in = tmp_path / "etc/systemd/system/exo-mesh.service.d/10-rkllama.conf"
    assert install(tmp_path) == 0
    assert not drop_in.exists()
    rkllama = tmp_path / "etc/systemd/system/rkllama.service"
    rkllama.write_text("[Service]\nExecStart=/bin/true\n")
    assert install(tmp_path) == 0
    assert "After=rkllama.service" in drop_in.read_text()
    assert f"ExecStartPre=-{PROGRAM} service wait 127.0.0.1:8080 --for 30" in drop_in.read_text()
    assert rkllama.read_text() == "[Service]\nExecStart=/bin/true\n"
    rkllama.unlink()
    assert install(tmp_path) == 0
    assert not drop_in.parent.exists()


# what it refuses


def test_it_asks_for_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = tmp_path / "exo-mesh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("exo_mesh.cli.services.program.require_readable", lambda paths: None)
    assert main(["service", "install", "--manager", "systemd", "--program", str(program)]) == exit_codes.USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "belongs to root: run `sudo " in said
    assert "exo-mesh service install --user" in said


def test_sudo_does_not_install_the_service_of_a_person(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", "me")
    assert main(["service", "uninstall", "--user"]) == exit_codes.USAGE
    assert "without sudo" in capsys.readouterr().err


def test_an_environment_that_the_sandbox_hides_is_refused_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "exo-mesh"  # pytest's directories are in /tmp, of which the service has its own
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert main(["service", "install", "--manager", "systemd", "--program", str(program)]) == exit_codes.USAGE
    said = capsys.readouterr().err
    assert f"cannot read {program}" in said
    assert "python3 -m venv /opt/exo-mesh" in said


def test_a_link_into_a_hidden_directory_is_refused_with_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, link = tmp_path / "home" / "python3", tmp_path / "venv"
    hidden.parent.mkdir()
    hidden.touch()
    link.symlink_to(hidden)
    monkeypatch.setattr("exo_mesh.cli.services.program._HIDDEN", {str(hidden.parent): "it is hidden"})
    with pytest.raises(ConfigError, match=f"cannot read {link}, which leads to {hidden}: it is hidden; install"):
        require_readable([link])


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/home/me/venv/bin/exo-mesh", "ProtectHome hides home directories from the service"),
        (f"{pwd.getpwuid(0).pw_dir}/.local/bin/exo-mesh", "ProtectHome hides home directories from the service"),
        ("/run/user/1000/x", "ProtectHome hides home directories from the service"),
        ("/var/tmp/x", "the service has a private /var/tmp"),
        ("/etc", ""),
        ("/bin/sh", ""),
    ],
)
def test_what_the_unit_cannot_see(path: str, why: str) -> None:
    assert obstacle(Path(path)) == why


def test_modes_count_too() -> None:
    closed = Path("/etc/shadow")
    if not closed.exists():
        pytest.skip("no file that only root may read")
    assert "so only some users may read it" in obstacle(closed)


# launchd


def test_the_plists_say_what_launchd_needs() -> None:
    daemon, agent = daemon_plan(PROGRAM, "me", Path("/Users/me")), agent_plan(PROGRAM, Path("/Users/me"), 501)
    job = plistlib.loads(daemon.unit.text.encode())
    assert job["UserName"] == "me"
    assert job["ProgramArguments"][-4:] == [str(PROGRAM), "serve", "--log-format", "json"]
    assert (job["RunAtLoad"], job["KeepAlive"], job["ExitTimeOut"]) == (True, {"SuccessfulExit": False}, 45)
    assert job["SoftResourceLimits"] == {"NumberOfFiles": 65536}
    assert str(daemon.unit.path) == "/Library/LaunchDaemons/exo-mesh.node.plist"
    assert "UserName" not in plistlib.loads(agent.unit.text.encode())
    assert agent.start[-1].command == ("launchctl", "bootstrap", "gui/501", str(agent.unit.path))
    assert str(agent.unit.path) == "/Users/me/Library/LaunchAgents/exo-mesh.node.plist"


@pytest.mark.skipif(not shutil.which("plistutil"), reason="plistutil is not installed")
def test_another_reader_takes_the_plists(tmp_path: Path) -> None:
    for plan in (daemon_plan(PROGRAM, "me", Path("/Users/me & co")), agent_plan(PROGRAM, Path("/Users/me"), 501)):
        path, binary = tmp_path / "job.plist", tmp_path / "job.bin"
        path.write_text(plan.unit.text)
        subprocess.run(["plistutil", "-i", str(path), "-o", str(binary), "-f", "bin"], check=True, timeout=30)
        assert plistlib.loads(binary.read_bytes()) == plistlib.loads(plan.unit.text.encode())


def test_the_shell_of_a_plist_reads_the_settings_and_becomes_the_program(tmp_path: Path) -> None:
    env = tmp_path / "with a space.env"
    command = ["/bin/sh", "-c", START, str(env), "/bin/sh", "-c", "echo $$ $EXO_MESH_NAME"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as without:
        assert without.communicate(timeout=30)[0] == f"{without.pid}\n"
    env.write_text("# a comment\nEXO_MESH_NAME='studio 1'\n")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.communicate(timeout=30)[0] == f"{started.pid} studio 1\n"


def test_the_states_of_both_managers_are_read() -> None:
    shown = "ActiveState=failed\nSubState=failed\nUnitFileState=enabled\nNRestarts=5\nResult=start-limit-hit\n"
    assert state_line(shown) == (False, "failed (failed), enabled, 5 restarts, last result: start-limit-hit")
    printed = "system/exo-mesh.node = {\n\tactive count = 1\n\tstate = running\n\tpid = 77\n\tlast exit code = 0\n}\n"
    assert print_state(printed) == (True, "running, pid 77")


# waiting for a port


def test_waiting_ends_when_the_port_opens() -> None:
    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{later.getsockname()[1]}"
        assert not wait_for_port(address, 0.01)
        opening = threading.Timer(0.1, later.listen)
        opening.start()
        assert wait_for_port(address, 20)
        opening.join()


def test_waiting_for_nobody_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "wait", "127.0.0.1:1", "--for", "0"]) == exit_codes.FAILED
    assert main(["service", "wait", "8080"]) == exit_codes.USAGE


# a real systemd

COMMAND = "/opt/exo-mesh/bin/exo-mesh"
DROP_INS = "/etc/systemd/system/exo-mesh.service.d"
SETTINGS = (
    "EXO_MESH_HOST=127.0.0.1\nEXO_MESH_DISCOVERY=none\nEXO_MESH_ENGINE=dummy\nEXO_MESH_NAME=kept\n"
    "EXO_MESH_SPARE_RUNNERS=0\n"
)
SLOW = SETTINGS + "EXO_MESH_ENGINE_OPTION=cost_ms=10\n"
"""An answer takes seconds: the lock is taken for work that is seen once a second."""


def service(systemd: RealSystemd, what: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return systemd.run(COMMAND, "service", what, "--program", COMMAND, check=check)


@pytest.mark.extended
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")
def test_a_real_systemd_runs_the_unit_as_it_is_shipped(tmp_path: Path) -> None:
    with real_systemd(tmp_path) as systemd:
        systemd.write("/etc/default/exo-mesh", SETTINGS)
        assert "systemctl restart exo-mesh.service" in service(systemd, "install").stdout
        status = service(systemd, "status").stdout
        assert "exo-mesh.service: active (running), enabled, 0 restarts, ok; http://127.0.0.1:52415" in status
        pid = systemd.show("exo-mesh", "MainPID")
        owner = systemd.run("stat", "-c", "%U", f"/proc/{pid}").stdout.strip()
        assert owner not in ("root", "nobody")
        assert "name=kept" in systemd.run("sh", "-c", f"{COMMAND} status | grep -o kept | sed s/^/name=/").stdout
        # again: nothing changes, nothing restarts, the settings stay
        assert "the service runs, and nothing has changed" in service(systemd, "install").stdout
        assert systemd.show("exo-mesh", "MainPID") == pid
        assert systemd.run("cat", "/etc/default/exo-mesh").stdout == SETTINGS
        # a node that is stopped on purpose stays stopped
        systemd.run(COMMAND, "node", "stop", "--home", "/var/lib/exo-mesh")
        systemd.wait("exo-mesh", "ActiveState", "inactive")
        assert systemd.show("exo-mesh", "Result") == "success"
        assert service(systemd, "status", check=False).returncode == exit_codes.FAILED
        # five failures within 300 s are the end
        quick = "[Service]\nRestartSec=10ms\nExecStart=\nExecStart=/bin/false\n"
        systemd.write("/etc/systemd/system/exo-mesh.service.d/override.conf", quick)
        systemd.run("systemctl", "daemon-reload")
        systemd.run("systemctl", "reset-failed", "exo-mesh")
        systemd.run("systemctl", "start", "exo-mesh", check=False)
        systemd.wait("exo-mesh", "ActiveState", "failed")
        assert int(systemd.show("exo-mesh", "NRestarts")) == 5
        gone = service(systemd, "uninstall").stdout
        assert "removed: /etc/systemd/system/exo-mesh.service" in gone
        assert "kept: /etc/default/exo-mesh, /var/lib/exo-mesh" in gone
        assert (
            "/etc/systemd/system/exo-mesh.service.d/override.conf"
            in systemd.run("sh", "-c", "find /etc/systemd/system -type f").stdout
        )
        assert service(systemd, "status", check=False).stdout.startswith("exo-mesh.service: not installed")


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")
def test_a_real_systemd_restarts_a_node_that_was_killed_or_hangs(tmp_path: Path) -> None:
    with real_systemd(tmp_path) as systemd:
        systemd.write("/etc/default/exo-mesh", SETTINGS)
        systemd.write(
            "/etc/systemd/system/exo-mesh.service.d/override.conf", "[Service]\nRestartSec=1\nWatchdogSec=3\n"
        )
        service(systemd, "install")
        for restarts, signal in ((1, "KILL"), (2, "STOP")):
            pid = systemd.show("exo-mesh", "MainPID")
            systemd.run("kill", f"-{signal}", pid)
            systemd.wait("exo-mesh", "NRestarts", str(restarts))
            systemd.wait("exo-mesh", "ActiveState", "active")
            assert systemd.show("exo-mesh", "MainPID") != pid


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")
def test_the_node_waits_for_rkllama_and_starts_without_it(tmp_path: Path) -> None:
    with real_systemd(tmp_path) as systemd:
        systemd.write("/etc/default/exo-mesh", SETTINGS)
        listen = "import socket,time; time.sleep(4); s=socket.create_server(('127.0.0.1',8080)); time.sleep(600)"
        python = f"/opt/python/bin/{Path(sys.executable).resolve().name}"
        unit = f'[Service]\nEnvironment=LD_LIBRARY_PATH=/opt/python/lib\nExecStart={python} -c "{listen}"\n'
        systemd.write("/etc/systemd/system/rkllama.service", unit)
        assert "RKLLAMA is installed" in service(systemd, "install").stdout
        assert "127.0.0.1:8080 is open" in systemd.log()
        systemd.run("systemctl", "disable", "rkllama", check=False)
        systemd.write("/etc/systemd/system/rkllama.service", "[Service]\nExecStart=/bin/false\n")
        quick = f"[Service]\nExecStartPre=\nExecStartPre=-{COMMAND} service wait 127.0.0.1:8080 --for 1\n"
        systemd.write(f"{DROP_INS}/20.conf", quick)
        systemd.run("systemctl", "daemon-reload")
        systemd.run("systemctl", "stop", "rkllama")
        systemd.run("systemctl", "restart", "exo-mesh")
        assert "127.0.0.1:8080 is not open" in systemd.log()
        assert systemd.show("exo-mesh", "ActiveState") == "active"


USER_MANAGER = """[Unit]
DefaultDependencies=no
[Service]
User=games
Type=notify
Environment=XDG_RUNTIME_DIR=/run/user/5 HOME=/var/person
Environment=SYSTEMD_UNIT_PATH=/run/user-units:/var/person/.config/systemd/user
ExecStart=/lib/systemd/systemd --user
Delegate=yes
KillMode=mixed
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")
def test_a_real_manager_of_a_person_runs_the_service_also_without_namespaces(tmp_path: Path) -> None:
    with real_systemd(tmp_path) as systemd:
        for target in ("default", "basic", "shutdown", "exit"):
            systemd.write(f"/run/user-units/{target}.target", "[Unit]\nDefaultDependencies=no\n")
        systemd.write("/run/units/user-manager.service", USER_MANAGER)
        settings = "/var/person/.config/exo-mesh/service.env"
        systemd.write(settings, SETTINGS)
        systemd.run("sh", "-c", "mkdir -p /run/user/5; chown -R games: /var/person /run/user/5; chmod 700 /run/user/5")
        systemd.run("systemctl", "daemon-reload")
        systemd.run("systemctl", "start", "user-manager")
        environ = ["env", "-i", "HOME=/var/person", "XDG_RUNTIME_DIR=/run/user/5", "PATH=/usr/bin:/bin"]
        person = ["setpriv", "--reuid=games", "--regid=games", "--clear-groups", *environ]
        verb = [*person, COMMAND, "service"]
        said = systemd.run(*verb, "install", "--user", "--program", COMMAND).stdout
        assert f"kept: {settings}" in said
        again = systemd.run(*verb, "install", "--user", "--program", COMMAND).stdout
        assert "the service runs, and nothing has changed" in again
        status = systemd.run(*verb, "status", "--user", "--program", COMMAND).stdout
        assert "exo-mesh.service: active (running), enabled" in status
        pid = systemd.run(*person, "systemctl", "--user", "show", "exo-mesh", "-p", "MainPID", "--value").stdout.strip()
        assert systemd.run("stat", "-c", "%U", f"/proc/{pid}").stdout.strip() == "games"
        assert "removed: " in systemd.run(*verb, "uninstall", "--user", "--program", COMMAND).stdout
        assert systemd.run(*verb, "status", "--user", check=False).returncode == exit_codes.FAILED


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")
def test_the_node_is_told_of_a_sleep_and_holds_a_lock_while_it_works(tmp_path: Path) -> None:
    with real_systemd(tmp_path) as systemd:
        # a program in the place of systemd-inhibit, which would ask a logind
        inhibit = '#!/bin/sh\necho "$@" >> /var/lib/exo-mesh/locks\nwhile [ "$#" -gt 1 ]; do shift; done\nexec "$@"\n'
        systemd.write("/opt/first/systemd-inhibit", inhibit)
        systemd.run("sh", "-c", "chmod -R a+rx /opt/first; mkdir -p /run/systemd/inhibit")
        systemd.write("/etc/default/exo-mesh", SLOW + "PATH=/opt/first:/usr/bin:/bin\n")
        service(systemd, "install")
        systemd.run("systemctl", "start", "sleep.target")
        assert "this machine is going to sleep; 0 of 0 peers acknowledged" in systemd.log()
        systemd.run("systemctl", "stop", "sleep.target")
        systemd.wait("exo-mesh-sleep", "ActiveState", "inactive")
        assert "this machine is awake again" in systemd.log()
        systemd.run(COMMAND, "run", "exo-mesh-demo", "hello", "--max-tokens", "400", "--home", "/var/lib/exo-mesh")
        locks = systemd.run("cat", "/var/lib/exo-mesh/locks").stdout
        assert "--mode=block --what=sleep:idle cat" in locks


BUS = """[Unit]
DefaultDependencies=no
[Service]
Type=notify
ExecStart=/usr/bin/dbus-daemon --system --address=unix:path=/run/dbus/system_bus_socket --nofork --nopidfile \\
  --systemd-activation
"""
LOGIND = """[Unit]
DefaultDependencies=no
[Service]
Type=notify
BusName=org.freedesktop.login1
ExecStart=/lib/systemd/systemd-logind
"""
has_logind = all(Path(path).exists() for path in ("/usr/bin/dbus-daemon", "/lib/systemd/systemd-logind"))


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()) or not has_logind, reason=why_not() or "dbus-daemon or logind is not installed")
def test_a_real_logind_holds_the_lock_until_the_node_is_killed(tmp_path: Path) -> None:
    with real_systemd(tmp_path) as systemd:
        systemd.run("mkdir", "-p", "/run/dbus", *(f"/run/systemd/{name}" for name in ("seats", "inhibit", "users")))
        systemd.write("/run/units/dbus.service", BUS)
        systemd.write("/run/units/systemd-logind.service", LOGIND)
        # as root: anybody else needs polkit, which says yes to locks against idle sleep
        systemd.write(f"{DROP_INS}/as-root.conf", "[Service]\nDynamicUser=no\nUser=root\nRestart=no\n")
        systemd.write("/etc/default/exo-mesh", SLOW)
        systemd.run("systemctl", "daemon-reload")
        for unit in ("dbus", "systemd-logind"):  # one after the other: logind ends at once where there is no bus
            systemd.run("systemctl", "start", unit)
        service(systemd, "install")
        assert systemd.run("systemd-inhibit", "--list").stdout == "No inhibitors.\n"
        systemd.run(COMMAND, "run", "exo-mesh-demo", "hello", "--max-tokens", "300", "--home", "/var/lib/exo-mesh")
        held = systemd.run("systemd-inhibit", "--list").stdout
        assert re.search(r"^exo-mesh 0 +root \d+ systemd-inhibit sleep:idle requests run block$", held, re.MULTILINE)
        systemd.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "exo-mesh")
        systemd.wait("exo-mesh", "ActiveState", "failed")
        assert systemd.run("systemd-inhibit", "--list").stdout == "No inhibitors.\n"
