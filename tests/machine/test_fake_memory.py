"""Another machine's memory, for tests: by its size, or from a file that is read anew each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from exo_mesh.errors import InputError
from exo_mesh.machine.fake_memory import FakeMemoryFile, overridden, reader_for
from exo_mesh.machine.memory import read_memory

GIB = 2**30


def test_without_settings_it_is_that_of_this_machine() -> None:
    assert reader_for(None, None) is read_memory
    with pytest.raises(InputError, match="contradict"):
        reader_for(GIB, Path("/x"))


def test_an_overridden_machine_has_so_much_less_what_we_and_our_children_take() -> None:
    own = psutil.Process().memory_info().rss
    code = "held = bytearray(100 << 20); print('held', flush=True); input()"
    before = overridden(16 * GIB)
    assert before.total_bytes == 16 * GIB and before.available_bytes <= 16 * GIB - own // 2
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert before.available_bytes - overridden(16 * GIB).available_bytes > 50 << 20
        child.kill()
    assert overridden(1000).available_bytes == 0, "never less than nothing"


def test_a_file_is_read_each_time_and_what_is_half_written_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    file.write_text("16GiB 12GiB\n")
    read = FakeMemoryFile(file)
    file.write_text("16GiB 0")
    assert (read().total_bytes, read().available_bytes) == (16 * GIB, 0)
    for text in ("", "16GiB", "16GiB 17GiB", "lots none"):
        file.write_text(text)
        assert read().available_bytes == 0
    file.write_text("17179869184 1024")
    assert read().available_bytes == 1024
    file.unlink()
    assert read().available_bytes == 1024


@pytest.mark.parametrize("text", ["", "16GiB", "16GiB 17GiB", "0 0", "a b", None])
def test_a_file_that_is_wrong_from_the_start_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "memory"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=f"--fake-mem-file {file}: "):
        FakeMemoryFile(file)
