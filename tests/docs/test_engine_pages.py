"""Each engine has a page under docs/reference/engines that names its options, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from exo_mesh_dummy.options import DummyOptions
from exo_mesh_llamacpp.options import OPTIONS as LLAMACPP_OPTIONS
from exo_mesh_mlx.options import MlxOptions
from exo_mesh_numpy.options import NumpyOptions
from exo_mesh_openai.options import OPTIONS as OPENAI_OPTIONS
from exo_mesh_rkllm.options import RkllmOptions
from exo_mesh_torch.options import OPTIONS as TORCH_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "reference" / "engines"


def documented_options(engine: str) -> set[str]:
    section = (PAGES / f"{engine}.md").read_text().partition("## Options")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_every_engine_of_this_repository_has_a_page() -> None:
    own = {path.name.removeprefix("exo_mesh_") for path in (ROOT / "engines").glob("exo_mesh_*")}
    assert {path.stem for path in PAGES.glob("*.md")} == own


def test_the_options_on_each_page_are_those_of_the_code() -> None:
    assert documented_options("mlx") == {*MlxOptions.__struct_fields__}
    assert documented_options("torch") == set(TORCH_OPTIONS)
    assert documented_options("numpy") == {*NumpyOptions.__struct_fields__}
    assert documented_options("llamacpp") == set(LLAMACPP_OPTIONS)
    assert documented_options("rkllm") == {*RkllmOptions.__struct_fields__}
    assert documented_options("dummy") == {*DummyOptions.__struct_fields__}
    assert documented_options("openai") == set(OPENAI_OPTIONS)
