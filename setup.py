"""The metadata is in pyproject.toml. This file makes two builds of one tree equal, byte for byte.

The time of the build, the umask, the owner of the files and what an earlier build left behind do not change the result.
SOURCE_DATE_EPOCH sets the time that the archives carry.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

DEFAULT_EPOCH = "1580601600"
"""2020-02-02: a fixed time that zip files can hold (they begin in 1980)."""

os.environ.setdefault("SOURCE_DATE_EPOCH", DEFAULT_EPOCH)
os.umask(0o022)  # the wheel records the modes of the files that the build writes


class CleanBuild(build_py):
    """Begins with an empty build folder: `build/lib` of an earlier build may hold modules that are gone."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class ReproducibleSdist(sdist):
    """Writes members in the order of their names, with one time, one owner and two modes."""

    def run(self) -> None:
        for sources in Path().glob("*.egg-info/SOURCES.txt"):  # setuptools would add what an earlier build listed
            sources.unlink()
        super().run()

    def make_archive(
        self,
        base_name: str | os.PathLike[str],
        format: str,
        root_dir: str | os.PathLike[str] | bytes | None = None,
        base_dir: str | None = None,
        owner: str | None = None,
        group: str | None = None,
    ) -> str:
        if format != "gztar" or base_dir is None:
            return str(super().make_archive(base_name, format, root_dir, base_dir, owner, group))
        target = Path(f"{base_name}.tar.gz")
        target.parent.mkdir(parents=True, exist_ok=True)
        epoch = int(os.environ["SOURCE_DATE_EPOCH"])
        with (
            target.open("wb") as file,
            gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as packed,
            # dereference: the release tree consists of hard links, which must be files in the archive
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, dereference=True) as archive,
        ):
            for path in [Path(base_dir), *sorted(Path(base_dir).rglob("*"))]:
                archive.add(path, recursive=False, filter=lambda member: _anonymous(member, epoch))
        return str(target)


def _anonymous(member: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    """The member without what differs from machine to machine."""
    member.mtime = epoch
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


options: dict[str, Any] = {"cmdclass": {"build_py": CleanBuild, "sdist": ReproducibleSdist}}
setup(**options)
