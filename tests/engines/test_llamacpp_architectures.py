"""The architectures that the llama.cpp engine runs from GGUF files are those that were proved to be exact."""

from __future__ import annotations

import datetime
import time

import pytest
from exo_mesh_llamacpp import provider
from exo_mesh_llamacpp.families import FAMILIES
from exo_mesh_llamacpp.gguf_rules import RULES

from tools.architectures.check import check_apart
from tools.architectures.pages import LLAMACPP as PAGE

BUDGET_S = 6.0
"""No architecture is begun after so long."""


def test_every_architecture_with_rules_is_exact_on_the_page_and_no_other() -> None:
    exact = {arch for arch, state in PAGE.states().items() if state == "exact"}
    assert exact == set(RULES)
    assert len(exact) >= 60


def test_the_provider_supports_what_it_reads_from_either_kind_of_file() -> None:
    assert all(provider.supports(name) for name in (*FAMILIES, *RULES))
    assert not any(provider.supports(name) for name in ("bert", "gemma2", "t5", "", "no_such_thing"))


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_some_architectures_are_as_the_page_says() -> None:
    """Others each day: every twentieth, in turns."""
    if not provider.availability().available:
        pytest.skip("xllamacpp is not installed")
    if PAGE.versions not in PAGE.read():
        pytest.skip("the page is of another version of the library")
    page = PAGE.states()
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    begin = time.monotonic()
    tried = 0
    for arch in sorted(RULES)[day % 20 :: 20]:
        if time.monotonic() - begin > BUDGET_S:
            break
        [outcome] = check_apart("llamacpp", [arch], few=True)
        tried += 1
        assert outcome.state == page[arch], (arch, outcome.reason, outcome.different)
    assert tried
