"""An update by scripts/install.sh never replaces an engine library that the user built, such as one for a GPU, and adds
none that the user left out."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.installs import ROOT

pytestmark = pytest.mark.slow

if sys.platform == "win32":
    pytest.skip("a script for POSIX shells", allow_module_level=True)


def make_wheel(folder: Path, name: str, version: str, code: str, requires: tuple[str, ...] = ()) -> Path:
    """A wheel with one module, and with an entry point as exo-mesh has one."""
    folder.mkdir(exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {one}" for one in requires),
        *(["Provides-Extra: mlx"] if any("extra ==" in one for one in requires) else []),
    ]
    files = {
        f"{module}.py": code,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {module}:main\n",
    }
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        record = []
        for file, text in files.items():
            archive.writestr(file, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(text.encode())}")
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]))
    return path


def package(folder: Path, version: str, needs: str) -> Path:
    """Stands for a release of exo-mesh that needs the library."""
    return make_wheel(folder, "exo-mesh", version, f"def main():\n    print('exo-mesh {version}')\n", (needs,))


def test_a_library_built_for_a_gpu_stays_until_the_user_says_otherwise(tmp_path: Path) -> None:
    home, index = tmp_path / "home", tmp_path / "index"
    home.mkdir()
    for version in ("0.3.36", "0.4.0"):
        make_wheel(index, "llama-cpp-python", version, "BUILT_FOR = 'cpu'\n")
    own = make_wheel(tmp_path / "own", "llama-cpp-python", "0.3.36", "BUILT_FOR = 'gpu'\n")
    environ = {"HOME": str(home), "PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    python = home / ".local/lib/exo-mesh/bin/python"

    def install(wheel: Path, *args: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(ROOT / "scripts/install.sh"), "--python", sys.executable, "--extras", "none"]
        return subprocess.run(
            [*command, "--from", str(wheel), *args],
            capture_output=True, text=True, timeout=600, check=False, env=environ, cwd=home,
        )  # fmt: skip

    def built_for() -> str:
        code = "import llama_cpp_python as library; print(library.BUILT_FOR)"
        # without the variables of this process: a folder of bytecode would be read, which pip does not refresh
        return subprocess.check_output([str(python), "-c", code], text=True, timeout=60, env=environ).strip()

    first = install(package(tmp_path, "1.0", "llama-cpp-python>=0.3"))
    assert (first.returncode, built_for()) == (0, "cpu"), first.stderr
    replace = [str(python), "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(own)]
    subprocess.run(replace, check=True, timeout=60, env=environ)

    updated = install(package(tmp_path, "1.1", "llama-cpp-python>=0.3"))
    assert updated.returncode == 0, updated.stderr
    assert "keeping: llama-cpp-python===0.3.36" in updated.stdout and "installed: exo-mesh 1.1" in updated.stdout
    assert built_for() == "gpu"

    needs_newer = package(tmp_path, "1.2", "llama-cpp-python>=0.4")
    refused = install(needs_newer)
    assert refused.returncode == 1
    assert refused.stderr.endswith("if an installed engine library is too old, --upgrade-engines replaces it\n")
    assert built_for() == "gpu"
    assert "1.1" in install(needs_newer, "--version").stdout, "the version before still runs"

    assert install(needs_newer, "--upgrade-engines").returncode == 0
    assert built_for() == "cpu"


def test_a_lean_installation_has_all_but_the_libraries_of_tokenizers_and_stays_so(tmp_path: Path) -> None:
    home, index = tmp_path / "home", tmp_path / "index"
    home.mkdir()
    for name in ("mlx", "transformers", "sentencepiece", "pyyaml"):
        make_wheel(index, name, "6.0", "")
    make_wheel(index, "mlx-lm", "0.32", "", ("mlx>=1", "transformers>=5", "sentencepiece", "pyyaml"))
    environ = {"HOME": str(home), "PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    needs = ("mlx>=1; extra == 'mlx'", "mlx-lm>=0.32; extra == 'mlx'")

    def install(version: str, *args: str) -> set[str]:
        wheel = make_wheel(tmp_path, "exo-mesh", version, f"def main():\n    print('exo-mesh {version}')\n", needs)
        command = ["sh", str(ROOT / "scripts/install.sh"), "--python", sys.executable, "--extras", "mlx"]
        done = subprocess.run(
            [*command, "--from", str(wheel), *args],
            capture_output=True, text=True, timeout=600, check=False, env=environ, cwd=home,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        python = home / ".local/lib/exo-mesh/bin/python"
        code = "from importlib import metadata; print(*(one.name for one in metadata.distributions()))"
        found = subprocess.check_output([str(python), "-c", code], text=True, timeout=60, env=environ)
        return set(found.split()) - {"pip", "setuptools"}

    lean = {"exo-mesh", "mlx", "mlx-lm", "pyyaml"}
    assert install("1.0", "--lean") == lean
    assert install("1.1") == lean, "an update does not bring them"
    assert install("1.2", "--upgrade-engines") == lean
