"""Rules of the tree that no linter has."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def sources() -> list[tuple[str, str]]:
    """(path, text) of every module of exo_mesh and the engines."""
    paths = [path for folder in ("exo_mesh", "engines") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


def trees_with(word: str) -> Iterator[tuple[str, ast.Module]]:
    """(path, syntax tree) of those modules whose text has the word: parsing all of them takes seconds."""
    return ((path, ast.parse(text)) for path, text in sources() if word in text)


def uses_of_wait_for(tree: ast.AST) -> Iterator[int]:
    """Lines that use asyncio.wait_for, under whatever name the module was imported."""
    modules = {"asyncio", "asyncio.tasks"}
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in modules
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            yield from (node.lineno for alias in node.names if alias.name == "wait_for")
        elif isinstance(node, ast.Attribute) and node.attr == "wait_for" and ast.unparse(node.value) in names:
            yield node.lineno


def test_nothing_waits_by_wait_for_which_may_swallow_a_cancellation() -> None:
    """In Python 3.11 a task that is cancelled just when what it waits for ends goes on as if nothing had been said;
    `async with asyncio.timeout(…)` does not."""
    found = [f"{path}:{line}" for path, tree in trees_with("wait_for") for line in uses_of_wait_for(tree)]
    assert not found, "use asyncio.timeout"


@pytest.mark.parametrize(
    "source",
    ["import asyncio\nasyncio.wait_for(x, 1)", "import asyncio as a\na.wait_for(x, 1)",
     "from asyncio import wait_for as w"],
)  # fmt: skip
def test_the_rule_sees_each_way_to_break_it(source: str) -> None:
    assert list(uses_of_wait_for(ast.parse(source)))


def test_other_things_of_that_name_are_allowed() -> None:
    assert not list(uses_of_wait_for(ast.parse("import asyncio\nself.wait_for(x)\nasyncio.wait({x})")))


POINT_TO_POINT = {"send", "recv", "recv_like"}


def uses_of_point_to_point(tree: ast.AST) -> Iterator[int]:
    """Lines that use send, recv or recv_like of a module named `distributed`, under whatever name it was imported."""
    known_as: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known_as |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            known_as |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("distributed"):
            yield from (node.lineno for alias in node.names if alias.name in POINT_TO_POINT)
        elif isinstance(node, ast.Attribute) and node.attr in POINT_TO_POINT:
            first, dot, rest = ast.unparse(node.value).partition(".")
            if f"{known_as.get(first, first)}{dot}{rest}".split(".")[-1] == "distributed":
                yield node.lineno


def test_ranks_of_a_tensor_group_meet_in_collectives_only() -> None:
    """send and recv between two ranks crash over RDMA when one side comes late (SIGBUS in MLX's JACCL), so ranks use
    all_sum and all_gather; everything else between processes goes through gRPC."""
    found = [f"{path}:{line}" for path, tree in trees_with("distributed") for line in uses_of_point_to_point(tree)]
    assert not found, "use a collective of the group, or a frame"


@pytest.mark.parametrize(
    "source",
    ["import mlx.core as mx\nmx.distributed.send(x, 1)", "import mlx.core\nmlx.core.distributed.recv((1,), d, 0)",
     "from mlx.core import distributed as d\nd.recv_like(x, 0)", "from mlx.core.distributed import send",
     "import torch.distributed as dist\ndist.send(x, 1)", "from mlx import core\nreceive = core.distributed.recv"],
)  # fmt: skip
def test_the_rule_sees_each_way_to_send_to_one_rank(source: str) -> None:
    assert list(uses_of_point_to_point(ast.parse(source)))


def test_other_ways_to_send_are_allowed() -> None:
    source = "import mlx.core as mx\nmx.distributed.all_sum(x)\nself.link.send(frame)\nsend(frame)\nsocket.recv(9)"
    assert not list(uses_of_point_to_point(ast.parse(source)))


def imports_outside_functions(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports when it is imported itself: of modules, and of what is taken from them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_outside_functions(node)


def import_cycle(sources: Mapping[str, str]) -> list[str]:
    """Modules of which each imports the next and the last is the first again; empty if no cycle exists."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = imports_outside_functions(ast.parse(source))
        graph[module] = {name if name in sources else name.rpartition(".")[0] for name in names} & sources.keys()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        return list(exc.args[1])
    return []


@pytest.mark.parametrize("folder", [".", "engines"])
def test_no_modules_import_each_other_in_a_cycle(folder: str) -> None:
    files = [file for file in (ROOT / folder).glob("exo_mesh*/**/*.py") if "proto" not in file.parts]
    names = [".".join(file.relative_to(ROOT / folder).with_suffix("").parts) for file in files]
    sources = {name.removesuffix(".__init__"): file.read_text() for name, file in zip(names, files, strict=True)}
    assert len(sources) > 50
    assert import_cycle(sources) == []


def test_the_rule_sees_a_cycle_and_lets_functions_import_what_they_need() -> None:
    assert import_cycle({"p.a": "import p.b", "p.b": "if True:\n    from p import c", "p.c": "from p.a import x"})
    assert not import_cycle({"p.a": "import p.b", "p.b": "def f():\n    from p.a import x"})
    assert not import_cycle({"p": "from p.a import x", "p.a": "from p import b", "p.b": "import os"})


def copies_into_kept_messages(tree: ast.AST) -> Iterator[int]:
    """Lines that copy into an attribute of self, which lives for long."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_copy = node.func.attr in ("CopyFrom", "MergeFrom")
            if is_copy and ast.unparse(node.func.value).startswith("self."):
                yield node.lineno


def test_no_message_that_is_kept_is_copied_into_again_and_again() -> None:
    """The arena of a protobuf message grows with each copy of a list into it, and is freed with the message only: two
    heartbeats a second made 7 MB an hour."""
    found = [f"{path}:{line}" for path, tree in trees_with("From(") for line in copies_into_kept_messages(tree)]
    assert not found, "keep the new message instead"


def test_the_rule_sees_a_copy_into_a_kept_message() -> None:
    assert list(copies_into_kept_messages(ast.parse("self._before.CopyFrom(beat)")))
    assert not list(copies_into_kept_messages(ast.parse("reply.verdict.CopyFrom(verdict)")))


def finders_by_name(tree: ast.AST) -> Iterator[int]:
    """Lines that compare a text with both id and name of one thing, as in `text in (peer.id, peer.name)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sets = [node.left, *node.comparators]
        else:
            sets = [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd) else []
        for parts in (one.elts for one in sets if isinstance(one, ast.Tuple | ast.Set | ast.List)):
            of = {(ast.unparse(part.value), part.attr.removeprefix("peer_")) for part in parts
                  if isinstance(part, ast.Attribute)}  # fmt: skip
            if any((value, "id") in of and (value, "name") in of for value, _ in of):
                yield node.lineno


def test_one_rule_says_which_peer_a_text_means() -> None:
    suspect = re.compile(r"id,\s[\w.\s,\"']*name[)\]}]")
    trees = ((path, ast.parse(text)) for path, text in sources() if suspect.search(text))
    found = [f"{path}:{line}" for path, tree in trees for line in finders_by_name(tree)]
    assert not found, "use domain.peer_names"


@pytest.mark.parametrize(
    "source", ["x in (a.id, a.name)", "{a.b.id, a.b.name} & set(t)", "x in ('', e.peer_id, e.peer_name)"]
)
def test_the_rule_sees_a_second_finder(source: str) -> None:
    assert list(finders_by_name(ast.parse(source)))
    assert not list(finders_by_name(ast.parse("x in (a.id, b.name)")))


FUNCTION = re.compile(r"^ +(?:self\.)?(\w+): Callable\[", re.MULTILINE)
OTHER_FIELD = re.compile(
    r"^(?:    | +self\.)(\w+): (?!Callable)[\w.]+(?:\[[^\n]*\])?(?: \| None)?(?: = [^\n]*)?$", re.MULTILINE
)


def callable_attributes(texts: Iterable[str]) -> set[str]:
    """Names of attributes that are annotated as functions, and nowhere as something else."""
    functions, others = set[str](), set[str]()
    for text in texts:
        functions.update(FUNCTION.findall(text))
        others.update(OTHER_FIELD.findall(text))
    return functions - others


def assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of each, also of `a, b = c, d`."""
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value


def callbacks_put_in(tree: ast.AST, functions: set[str]) -> Iterator[int]:
    """Lines that put a function into an attribute of another object. functions: see callable_attributes."""
    for target, value in assignments(tree):
        if not isinstance(target, ast.Attribute) or ast.unparse(target.value) in ("self", "cls"):
            continue
        is_named = isinstance(value, ast.Name | ast.Attribute) and target.attr in functions
        is_named &= not (isinstance(value, ast.Attribute) and value.attr.isupper())
        is_partial = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "partial"
        if is_named or is_partial or isinstance(value, ast.Lambda):
            yield target.lineno


def test_a_callback_is_given_to_an_object_when_it_is_built() -> None:
    texts = {path: text for path, text in sources() if path.startswith("exo_mesh") and "proto" not in path}
    functions = callable_attributes(texts.values())
    assert {"on_change", "own_requests"} <= functions, "the pattern finds what it is for"
    suspect = re.compile(rf"\.(?:{'|'.join(functions)})\b[^\n]* = |\.\w+ = (?:lambda|\S*partial\()")
    trees = {path: ast.parse(text) for path, text in texts.items() if suspect.search(text)}
    found = [f"{path}:{line}" for path, tree in trees.items() for line in callbacks_put_in(tree, functions)]
    assert not found, "give it to the constructor, or let the other object ask"


@pytest.mark.parametrize(
    "source", ["host.on_use = beat", "host.on_use = link.beat", "a.b.c = lambda: 1", "x.f = functools.partial(g, 1)",
               "x.on_use, y = beat, 2"],
)  # fmt: skip
def test_the_rule_sees_a_callback_that_is_put_in_later(source: str) -> None:
    functions = callable_attributes(["class Host:\n    on_use: Callable[[], None]\n    name: str"])
    assert list(callbacks_put_in(ast.parse(source), functions))
    assert not list(callbacks_put_in(ast.parse("self.on_use = beat\nhost.on_use = None\nx.name = name"), functions))


def bare_system_errors(tree: ast.AST) -> Iterator[int]:
    """Lines of handlers of OSError that put the error itself into a text, with its number, as in "[Errno 13]"."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or not handler.name or handler.type is None:
            continue
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if "OSError" not in map(ast.unparse, kinds):
            continue
        for node in ast.walk(handler):
            value = node.value if isinstance(node, ast.FormattedValue) else None
            if isinstance(value, ast.Name) and value.id == handler.name:
                yield node.lineno


def test_errors_of_the_system_are_shown_in_words_without_their_number() -> None:
    modules = ((path, tree) for path, tree in trees_with("OSError") if path.startswith("exo_mesh/"))
    found = [f"{path}:{line}" for path, tree in modules for line in bare_system_errors(tree)]
    assert not found, "use reason_of of base/printable, or strerror"


def test_the_rule_sees_an_error_of_the_system_among_others() -> None:
    source = "try: f()\nexcept (ValueError, OSError) as exc: raise Bad(f'no: {exc}') from exc"
    assert list(bare_system_errors(ast.parse(source))) == [2]
    assert not list(bare_system_errors(ast.parse(source.replace("{exc}", "{reason_of(exc)}"))))


def clients_without_authorities(tree: ast.AST) -> Iterator[int]:
    """Lines that make a client of aiohttp which would use the contexts of aiohttp's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            needed = {"ClientSession": "connector", "TCPConnector": "ssl", "request": ""}.get(node.func.attr)
            is_client = ast.unparse(node.func.value) == "aiohttp" and needed is not None
            if is_client and needed not in [keyword.arg for keyword in node.keywords]:
                yield node.lineno


def test_clients_in_a_node_name_the_authorities_that_they_trust() -> None:
    """A node imports aiohttp without reading certificates, so a client with aiohttp's own context trusts nobody."""
    modules = ((path, tree) for path, tree in trees_with("aiohttp") if not path.startswith("exo_mesh/cli/"))
    found = [f"{path}:{line}" for path, tree in modules for line in clients_without_authorities(tree)]
    assert not found, "give it a TCPConnector with trusted() of base/authorities"


def test_the_rule_sees_a_client_without_authorities() -> None:
    bad = ("aiohttp.ClientSession(timeout=1)", "aiohttp.TCPConnector(limit=1)", "aiohttp.request('GET', url)")
    assert all(list(clients_without_authorities(ast.parse(source))) for source in bad)
    good = "aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))"
    assert not list(clients_without_authorities(ast.parse(good)))
