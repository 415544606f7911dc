"""A Jinja environment for chat templates, which are untrusted code: sandboxed, with limits on time and size.

The sandbox is the first line of defence and names what a template does wrong. No list of limits is complete, so
`template_child` runs the sandbox in a process whose memory and time the operating system limits.

Jinja's own sandbox keeps a template away from Python. It does not stop a template that runs or grows for ever. So every
way to repeat something (a loop, a call) checks the clock, and every way to grow a value has a size limit. The size that
counts is that of the value written out. A list that holds another list twice, which again holds a list twice, and so
on, is small in memory, but printing or comparing it takes for ever, and no Python code can interrupt that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, cast

import msgspec
from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from exo_mesh.text.template import MAX_LENGTH

MAX_ITEMS = 1 << 20  # items of a value, including those of all values inside it
MAX_NUMBER = 1 << 20  # largest number as an argument of a call: real widths and counts are far smaller
MAX_BITS = 256
MAX_SPREAD = 64 << 20  # most characters inside a value; also the upper estimate allowed for a join or replace
# Filters that no chat template needs, and that can produce a large value from a small one.
_REMOVED_FILTERS = ("batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "urlize", "wordwrap")


class TemplateLimitError(TemplateError):
    """A template ran too long or made a value that is too large."""


class _Budget(msgspec.Struct, frozen=True):
    deadline: float
    clock: Callable[[], float]

    def check(self) -> None:
        if self.clock() > self.deadline:
            raise TemplateLimitError("the chat template runs too long")


_budget: ContextVar[_Budget | None] = ContextVar("chat_template_budget", default=None)


@contextmanager
def time_limit(seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Inside this context, templates of this thread raise TemplateLimitError after `seconds`."""
    token = _budget.set(_Budget(clock() + seconds, clock))
    try:
        yield
    finally:
        _budget.reset(token)


def compile_template(source: str) -> tuple[Template, frozenset[str]]:
    """Compile a template with all limits built in. Returns it and the names that it reads from outside.

    Raises jinja2.TemplateError, or RecursionError if the template is nested too deeply.
    """
    environment = _Environment()
    tree = _Watch().visit(environment.parse(source))
    names = frozenset(meta.find_undeclared_variables(tree))
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None)), names


class _Watch(NodeTransformer):
    """Adds the limits to a template: `for x in y` iterates over `y|_watched`, and `a ~ b` becomes `(a ~ b)|_bounded`;
    `[a]`, `(a, b)` and `{a: b}` are bounded in the same way."""

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
        # The optimizer is off: it would compute constant expressions at compile time, outside the limits.
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
    """Renders the inside of `{% generation %}…{% endgeneration %}`, which only marks the text for training."""

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
    """Raises TemplateLimitError for a container that is too large when it is written out."""
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
    """Jinja's namespace with its content checked at every change. It may not hold another namespace."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(*args, **kwargs)
        _check_size(dict(*args[1:], **kwargs))

    def __setitem__(self, name: str, value: Any) -> None:
        _check_size([value])
        super().__setitem__(name, value)


_CONTAINERS = (list, tuple, dict, set, frozenset)


def _check_counts(*arguments: Any) -> None:
    """Raises TemplateLimitError for widths and counts larger than any template needs."""
    for value in arguments:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateLimitError(f"the chat template passes {value} to a call")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE_FIELD.search(text):
        raise TemplateLimitError("the chat template uses a format field with a computed or very large width")


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int) and len(value) * times > MAX_LENGTH:
            raise TemplateLimitError(f"the chat template makes a value of more than {MAX_LENGTH} characters")


def _check_spread(name: str, arguments: tuple[Any, ...]) -> None:
    """Raises TemplateLimitError if a `join` or `replace` may produce too much text.

    Both can copy one text once per character of another, so the product of the first and the last length is the bound.
    """
    lengths = [len(value) for value in arguments if isinstance(value, str | list | tuple | range)]
    if name in ("join", "replace") and len(lengths) > 1 and lengths[0] * lengths[-1] > MAX_SPREAD:
        raise TemplateLimitError("the chat template joins or replaces texts that are too long")


_WIDE_FIELD = re.compile(r"%[-+ #0]*(\*|\d{5})|\{[^{}]*:[^{}]*(\{|\d{5})")


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter of Jinja so that its result is bounded; its calling convention stays."""

    def limited(*args: Any, **kwargs: Any) -> Any:
        return _bounded(function(*args, **kwargs))

    limited.__dict__.update(getattr(function, "__dict__", {}))  # a built-in function has no __dict__
    return limited


def _sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the filter `sum` so that it adds only numbers: a sum of lists copies the first list once for each other."""

    def numbers_only(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, _CONTAINERS) for value in (*args[2:], *kwargs.values())):
            raise TemplateLimitError("the chat template uses the filter sum on values that are not numbers")
        return function(*args, **kwargs)

    numbers_only.__dict__.update(vars(function))
    return numbers_only


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter of Jinja so that its arguments are checked and its result bounded; its calling convention stays."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        _check_counts(*values)
        _check_spread(name, values)
        return _bounded(function(*args, **kwargs))

    guarded.__dict__.update(vars(function))  # keeps Jinja's mark on filters that take the context or environment
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
    """The filter `tojson` as transformers defines it for chat templates: no HTML escapes, non-ASCII stays."""
    _check_counts(indent)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return str(_bounded(text))


def strftime(now: Callable[[], datetime]) -> Callable[[str], str]:
    """The function `strftime_now`, with which many templates print a date."""
    return lambda format_: now().strftime(format_)
