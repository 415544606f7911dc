"""A group that somebody wrote down: each rule has its message, MLX reads what we write, mlx.launch can start us."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import free_port
from exo_mesh.cli.main import main
from exo_mesh.errors import InputError, MeshError
from exo_mesh.mesh.discovery.peers_file import parse_peers
from exo_mesh.mesh.discovery.static_group import launched_group, parse_hostfile, read_hostfile
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.support.nodes import MODEL, Machine, a_request, instances, knows_all, make_node, tokens, until
from tests.support.processes import clean_environ, eventually, gone

HOSTFILES = Path(__file__).parents[3] / "hostfiles"
EXAMPLES = sorted((*HOSTFILES.glob("*.json"), *HOSTFILES.glob("*.example")))

TWO: list[dict[str, Any]] = [
    {"ssh": "me@studio1", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en5"]},
    {"ssh": "studio2.local", "ips": ["10.0.0.2"], "rdma": ["rdma_en4", None]},
]


def parsed(content: Any) -> Any:
    return parse_hostfile(json.dumps(content), "hosts.json")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_are_good_and_mlx_reads_what_we_make_of_them(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = pytest.importorskip("mlx._distributed_utils.common")
    group = read_hostfile(file, min_hosts=1)
    converted = tmp_path / "converted.json"
    converted.write_text(json.dumps(group.as_mlx()))
    theirs = common.Hostfile.from_file(converted)
    assert [(host.ssh_hostname, tuple(host.ips), tuple(host.rdma)) for host in theirs.hosts] == [
        (host.ssh, host.ips, host.rdma) for host in group.hosts
    ]
    assert theirs.backend == group.backend
    assert read_hostfile(converted, min_hosts=1).hosts == tuple(group.hosts)
    assert parse_peers(file.read_text(), str(file), 5000), "not accepted by --peers-file"
    assert main(["hostfile", str(file)]) == 0
    one, more = "1 host: usable for --peers-file", f"{len(group.hosts)} ranks, backend {group.backend}"
    assert (one if len(group.hosts) == 1 else more) in capsys.readouterr().out


def test_the_examples_have_one_two_and_four_hosts_a_template_and_a_line_each_in_the_readme() -> None:
    readme = (HOSTFILES / "README.md").read_text()
    assert all(f"`{file.name}`" in readme for file in EXAMPLES)
    sizes = {file.name: len(read_hostfile(file, min_hosts=1).hosts) for file in EXAMPLES}
    assert [sizes[f"hosts-{count}node.json"] for count in (1, 2, 4)] == [1, 2, 4]
    assert sizes["hosts.json.example"] > 1


def test_a_file_with_one_host_is_no_tensor_group() -> None:
    with pytest.raises(InputError, match="a tensor group has 2 to 32 hosts, not 1"):
        read_hostfile(HOSTFILES / "hosts-1node.json")


def test_the_backend_follows_from_the_devices_unless_it_is_said() -> None:
    assert parsed(TWO).backend == "jaccl" and parsed(TWO).matrix == ((None, "rdma_en5"), ("rdma_en4", None))
    assert parsed({"hosts": TWO, "backend": "ring"}).matrix == ()
    assert parsed([{"host": "10.0.0.1"}, {"host": "b", "port": 7}]).hosts[1].addresses == ("b:7",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x", "must be a list of hosts"),
        ([], "must be a list of hosts"),
        (TWO[:1], "a tensor group has 2 to 32 hosts, not 1"),
        ({"hosts": TWO, "colour": "red"}, "colour: is unknown; the known keys are hosts, backend and envs"),
        ({"hosts": TWO, "backend": "mpi"}, 'backend: must be one of ring, jaccl, jaccl-ring, not "mpi"'),
        ({"hosts": [{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b"}], "backend": "jaccl"},
         "hosts: rank 0 lists 0 RDMA devices, but the group has 2 ranks"),
        ([TWO[0], {**TWO[1], "rdma": [None, None]}],
         "no RDMA device is listed from rank 1 to rank 0: a full mesh needs every pair"),
        ([{**TWO[0], "rdma": ["rdma_en1", "rdma_en5"]}, TWO[1]],
         "[0].rdma[0]: must be null: a host needs no device to reach itself"),
        ([{**TWO[0], "ips": []}, TWO[1]],
         "[0].ips: the first host needs an address, because the others connect to it"),
        ([TWO[0], {**TWO[1], "rdma": [None]}], "[1].rdma: must have one entry per host, 2, not 1"),
        ({"hosts": TWO, "envs": ["A=b"]},
         'envs[0]: must be MLX_METAL_FAST_SYNCH=0 or MLX_METAL_FAST_SYNCH=1, not "A=b"'),
        ({"hosts": TWO, "envs": "A=b"}, 'envs: must be a list of "NAME=VALUE"'),
        ([{"host": "a"}, {"port": 7}], "[1]: must be an object with ssh, ips and rdma, or with host and port"),
        ([{"host": "a"}, {"host": "b c"}], "[1].host: must be a host or an address"),
        ([{"host": "a"}, {"host": "b", "port": 0}], "[1].port: must be a port from 1 to 65535, not 0"),
    ],
)  # fmt: skip
def test_each_rule_has_one_clear_message(content: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        parsed(content)
    assert str(refused.value) == f"hosts.json: {message}" and refused.value.param == "hostfile"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json: cannot be read: No such file"):
        read_hostfile(tmp_path / "none.json")
    (tmp_path / "junk.json").write_text("{")
    with pytest.raises(InputError, match=r"junk\.json: is not JSON"):
        read_hostfile(tmp_path / "junk.json")


def test_this_machine_finds_itself_by_address_or_name() -> None:
    group = parsed(TWO)
    assert group.rank_of(["127.0.0.1", "10.0.0.2"], ["x"]) == 1
    assert group.rank_of([], ["Studio2"]) == 1 and group.rank_of([], ["studio1"]) == 0
    with pytest.raises(InputError, match="none of its hosts is this machine; set MLX_RANK"):
        group.rank_of(["10.0.0.9"], ["x"])
    with pytest.raises(InputError, match="ranks 0, 1 are all this machine"):
        group.rank_of(["10.0.0.1", "10.0.0.2"], [])


def test_all_ranks_of_one_file_say_the_same_of_their_group() -> None:
    one, two = (parsed(TWO).rank(rank) for rank in (0, 1))
    assert one.group == two.group and (one.rank, two.rank, one.size) == (0, 1, 2)
    assert one.rdma == (None, "rdma_en5") and one.group != parsed({"hosts": TWO, "backend": "ring"}).rank(0).group


# mlx.launch


def variables(tmp_path: Path, **files: Any) -> dict[str, str]:
    found = {}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
        found[name] = str(tmp_path / name)
    return found


def test_the_variables_of_mlx_launch_are_a_group(tmp_path: Path) -> None:
    ring = variables(tmp_path, MLX_HOSTFILE=[["10.0.0.1:32323"], ["10.0.0.2:32324"]])
    group, rank = launched_group({"MLX_RANK": "1", **ring}) or (None, 0)
    assert group is not None and (rank, group.backend) == (1, "ring")
    assert [host.ips for host in group.hosts] == [("10.0.0.1",), ("10.0.0.2",)]
    jaccl = variables(tmp_path, MLX_IBV_DEVICES=[[None, "rdma_en5"], ["rdma_en4", None]])
    environ = {"MLX_RANK": "0", "MLX_JACCL_COORDINATOR": "10.0.0.1:32323", **jaccl}
    found = launched_group(environ)
    assert found is not None and found[0].rank(0).rdma == (None, "rdma_en5") and found[0].backend == "jaccl"
    found = launched_group({**environ, "MLX_JACCL_RING": "1"})
    assert found is not None and found[0].backend == "jaccl-ring"
    assert launched_group({}) is None and launched_group({"MLX_RANK": "0"}) is None
    (tmp_path / "empty").write_text("")
    assert launched_group({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "empty")}) is None, "one rank is no group"


def test_the_rank_of_mpirun_is_a_rank_where_its_size_is_that_of_the_group(tmp_path: Path) -> None:
    ring = variables(tmp_path, MLX_HOSTFILE=[["10.0.0.1:32323"], ["10.0.0.2:32324"]])
    found = launched_group({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", **ring})
    assert found is not None and found[1] == 1
    found = launched_group({"MLX_RANK": "0", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "9", **ring})
    assert found is not None and found[1] == 0, "MLX's own variable wins"
    assert launched_group({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}) is None, "no group, only mpirun"
    with pytest.raises(InputError, match='OMPI_COMM_WORLD_SIZE is "3", but the group has 2 ranks'):
        launched_group({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", **ring})
    with pytest.raises(InputError, match='OMPI_COMM_WORLD_RANK is "2", but the group has 2 ranks'):
        launched_group({"OMPI_COMM_WORLD_RANK": "2", **ring})


@pytest.mark.parametrize(
    ("rank", "files", "coordinator", "message"),
    [
        ("2", {"MLX_HOSTFILE": [["a:1"], ["b:1"]]}, "", 'MLX_RANK is "2", but the group has 2 ranks'),
        ("x", {"MLX_HOSTFILE": [["a:1"], ["b:1"]]}, "", 'MLX_RANK is "x"'),
        ("0", {"MLX_HOSTFILE": [["a:1"], []]}, "", "rank 1 must be a list of address:port"),
        ("0", {"MLX_IBV_DEVICES": [[None, "a"], ["b"]]}, "c:1", "rank 1 lists 1 RDMA devices"),
        ("0", {"MLX_IBV_DEVICES": [[None, ["a", "b"]], ["b", None]]}, "c:1", "each pair of ranks must have one device"),
        ("0", {"MLX_IBV_DEVICES": [[None, "a"], ["b", None]]}, "", "MLX_JACCL_COORDINATOR must be the address:port"),
    ],
)
def test_variables_that_are_no_group_are_refused(
    tmp_path: Path, rank: str, files: dict[str, Any], coordinator: str, message: str
) -> None:
    environ = {"MLX_RANK": rank, "MLX_JACCL_COORDINATOR": coordinator, **variables(tmp_path, **files)}
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        launched_group(environ)
    with pytest.raises(InputError, match="MLX_HOSTFILE names nowhere, which cannot be read"):
        launched_group({"MLX_RANK": "0", "MLX_HOSTFILE": "nowhere"})


@pytest.mark.extended
async def test_nodes_of_one_hostfile_find_each_other_and_are_the_group_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two machines each finds its rank by its addresses; here both are one machine, and MLX_RANK says which."""
    ports = free_port(), free_port()
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([{"host": "127.0.0.1", "port": port} for port in ports]))
    nodes: list[Node] = []
    try:
        for rank, port in enumerate(ports):
            monkeypatch.setenv("MLX_RANK", str(rank))
            node = make_node(tmp_path / str(rank), f"n{rank}", Machine(), grpc_port=port, hostfile=file)
            nodes.append(node)
            await node.start()
        await until(lambda: all(knows_all(node, 2) for node in nodes))
        assert len(await tokens(nodes[1], a_request())) == 12
        (instance,) = instances(nodes[0])
        assert instance.stages[0].group.peers == tuple(node.node_id for node in nodes)
        alone = await nodes[0].instances.create(InstanceSpec(MODEL, tensor_group=1))
        assert len(alone.stages) == 1 and not alone.stages[0].group, "who asks for none gets none"
    finally:
        for node in nodes:
            await node.stop()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[list[ApiClient]]:
    """Two nodes that MLX's own launcher has started, each with a home and ports of its own."""
    pytest.importorskip("mlx._distributed_utils.launch")
    api, grpc = [free_port(), free_port()], [free_port(), free_port()]
    script = tmp_path / "node.sh"
    script.write_text(
        f"#!/bin/bash\napi=({api[0]} {api[1]}); grpc=({grpc[0]} {grpc[1]})\n"
        f"exec {sys.executable} -m exo_mesh.cli.main serve --home {tmp_path}/home-$MLX_RANK --name n$MLX_RANK "
        f"--host 127.0.0.1 --api-port ${{api[$MLX_RANK]}} --grpc-port ${{grpc[$MLX_RANK]}} --discovery none "
        f"--engine dummy --bootstrap-peers 127.0.0.1:{grpc[0]}\n"
    )
    script.chmod(0o755)
    start = "from mlx._distributed_utils.launch import main; main()"
    command = [sys.executable, "-c", start, "--hosts", "127.0.0.1", "-n", "2", "--backend", "ring", "--", str(script)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **clean_environ(tmp_path), "TMPDIR": str(tmp_path)},  # the launcher leaves files there
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield [ApiClient(f"http://127.0.0.1:{port}", tmp_path / f"home-{rank}") for rank, port in enumerate(api)]
    finally:
        nodes = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
        assert eventually(lambda: gone(nodes), 10)


@pytest.mark.extended
def test_under_mlx_launch_the_ranks_are_the_group(launched: list[ApiClient]) -> None:
    def both_there() -> bool:
        try:
            return all(len(client.get("/state")["telemetry"]) == 2 for client in launched)
        except MeshError:  # not up yet
            return False

    assert eventually(both_there, 60)
    instance = launched[1].post("/instance", {"model": MODEL}, 60)
    ranks = {peer["id"]: peer["static_rank"]["rank"] for peer in launched[0].get("/state")["view"]["peers"]}
    assert [ranks[peer] for peer in instance["stages"][0]["group"]["peers"]] == [0, 1]
    launched[0].delete(f"/instance/{instance['id']}", 15)
