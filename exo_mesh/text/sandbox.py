"""A Jinja environment for chat templates, which are code from strangers: sandboxed, bounded in time and size.

The sandbox is the first line of defence and says in clear words what a template does wrong. A list of limits is never
complete: `template_child` runs it in a process whose memory and time the system bounds.

Jinja's own sandbox keeps a template away from Python. It does not keep it from running or growing for ever, so every
way to repeat something (a loop, a call) looks at the clock, and every way to grow a value has a size limit. What counts
is the size of a value written out: a list that holds another one twice, which holds another one twice, is small in
memory, but to print or compare it takes for ever, and no Python code can stop that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from exo_mesh.text.template import MAX_LENGTH

MAX_ITEMS = 1 << 20  # of a value, with everything inside it
MAX_NUMBER = 1 << 20  # an argument of a call: widths and counts are far below
MAX_BITS = 256
MAX_SPREAD = 64 << 20  # most characters inside a value, or that a join or replace may come to, by a generous estimate
# Filters that no chat template needs, and that can make much out of little.
_REMOVED_FILTERS = ("batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "urlize", "wordwrap")


class TemplateLimitError(TemplateError):
    """A template ran too long or made a value that is too large."""


@dataclass(frozen=True, slots=True)
class _Budget:
    deadline: float
    clock: Callable[[], float]

    def check(self) -> None:
        if self.clock() > self.deadline:
            raise TemplateLimitError("the chat template runs too long")


_budget: ContextVar[_Budget | None] = ContextVar("chat_template_budget", default=None)


@contextmanager
def time_limit(seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Within it, a template of this thread raises TemplateLimitError once `seconds` have passed."""
    token = _budget.set(_Budget(clock() + seconds, clock))
    try:
        yield
    finally:
        _budget.reset(token)


def compile_template(source: str) -> tuple[Template, frozenset[str]]:
    """A template ready to render, and the names that it reads from outside.

    Raises jinja2.TemplateError, or RecursionError if it is nested absurdly deep.
    """
    environment = _Environment()
    tree = _Watch().visit(environment.parse(source))
    names = frozenset(meta.find_undeclared_variables(tree))
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None)), names


class _Watch(NodeTransformer):
    """Puts the limits into a template: `for x in y` iterates `y|_watched`, and `a ~ b` becomes `(a ~ b)|_bounded`, as
    do `[a]`, `(a, b)` and `{a: b}`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), "_watched")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "_bounded")

    visit_List = visit_Dict = visit_Concat

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "_bounded") if node.ctx == "load" else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    made.set_environment(node.environment)  # type: ignore[arg-type]
    return made


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Not optimized: the optimizer would compute constant expressions at compile time, outside the limits.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _Generation])
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters.update({name: _limited(function) for name, function in self.filters.items()})
        self.filters.update(
            _watched=_watched,
            _bounded=_bounded,
            tojson=_to_json,
            sum=_sum(self.filters["sum"]),
            **{name: _guarded(name, self.filters[name]) for name in ("join", "replace", "indent")},
        )
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        _check_counts(*args, *kwargs.values())
        _check_spread(name, (owner, *args))
        if name in ("format", "format_map"):
            _check_format(owner)
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        if operator == "**" and isinstance(right, int) and abs(right) > MAX_BITS:
            raise TemplateLimitError(f"the chat template computes a power of {right}")
        if operator == "%":
            _check_format(left)
        return _bounded(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model is trained on; here it just renders what is inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tick() -> None:
    if (budget := _budget.get()) is not None:
        budget.check()


def _watched(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _tick()
        yield item


def _bounded(value: Any) -> Any:
    _tick()
    if isinstance(value, str | bytes) and len(value) > MAX_LENGTH:
        raise TemplateLimitError(f"the chat template makes a value of more than {MAX_LENGTH} characters")
    if isinstance(value, _CONTAINERS):
        _check_size(value)
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TemplateLimitError(f"the chat template makes a number of more than {MAX_BITS} bits")
    return value


def _check_size(value: Any) -> None:
    """Refuse a container that is too large when it is written out."""
    num_items = num_characters = 0
    inside = [value]
    while inside:
        item = inside.pop()
        if isinstance(item, str | bytes):
            num_characters += len(item)
        elif isinstance(item, _CONTAINERS):
            num_items += len(item)
            if num_items > MAX_ITEMS:
                raise TemplateLimitError(f"the chat template makes a value of more than {MAX_ITEMS} items")
            inside.extend(item)
            inside.extend(item.values() if isinstance(item, dict) else ())
            _tick()
        elif isinstance(item, Namespace):
            raise TemplateLimitError("the chat template puts a namespace into another value")
    if num_characters > MAX_SPREAD:
        raise TemplateLimitError(f"the chat template makes a value of more than {MAX_SPREAD} characters")


class _Namespace(Namespace):
    """A template can change it, so that what it holds must be small at any time: no other namespace."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(*args, **kwargs)
        _check_size(dict(*args[1:], **kwargs))

    def __setitem__(self, name: str, value: Any) -> None:
        _check_size([value])
        super().__setitem__(name, value)


_CONTAINERS = (list, tuple, dict, set, frozenset)


def _check_counts(*arguments: Any) -> None:
    """Refuse widths and counts that no template needs."""
    for value in arguments:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateLimitError(f"the chat template passes {value} to a call")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE_FIELD.search(text):
        raise TemplateLimitError("the chat template formats with a computed or a very wide field")


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int) and len(value) * times > MAX_LENGTH:
            raise TemplateLimitError(f"the chat template makes a value of more than {MAX_LENGTH} characters")


def _check_spread(name: str, arguments: tuple[Any, ...]) -> None:
    """`join` and `replace` can copy one text as often as another is long: the first and the last text tell."""
    lengths = [len(value) for value in arguments if isinstance(value, str | list | tuple | range)]
    if name in ("join", "replace") and len(lengths) > 1 and lengths[0] * lengths[-1] > MAX_SPREAD:
        raise TemplateLimitError("the chat template joins or replaces too much")


_WIDE_FIELD = re.compile(r"%[-+ #0]*(\*|\d{5})|\{[^{}]*:[^{}]*(\{|\d{5})")


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja with its result bounded; its calling convention stays."""

    def limited(*args: Any, **kwargs: Any) -> Any:
        return _bounded(function(*args, **kwargs))

    limited.__dict__.update(getattr(function, "__dict__", {}))  # a built-in function has none
    return limited


def _sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `sum`, for numbers only: a sum of lists copies the first as often as there are others."""

    def numbers_only(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, _CONTAINERS) for value in (*args[2:], *kwargs.values())):
            raise TemplateLimitError("the chat template adds up something else than numbers")
        return function(*args, **kwargs)

    numbers_only.__dict__.update(vars(function))
    return numbers_only


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja with its arguments checked and its result bounded; its calling convention stays."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        _check_counts(*values)
        _check_spread(name, values)
        return _bounded(function(*args, **kwargs))

    guarded.__dict__.update(vars(function))  # Jinja's mark for filters that want the context or the environment
    return guarded


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers defines it for chat templates: no HTML escapes, non-ASCII kept."""
    _check_counts(indent)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return str(_bounded(text))


def strftime(now: Callable[[], datetime]) -> Callable[[str], str]:
    """The `strftime_now` that many templates print a date with."""
    return lambda format_: now().strftime(format_)
