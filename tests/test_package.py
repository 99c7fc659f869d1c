"""The published package: one version everywhere, described extras, a wheel that works where it is installed."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import octavo
from tests.support.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
USE = """
import torch, octavo, sys
assert octavo.__file__.startswith(sys.prefix), octavo.__file__
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
octavo.convert(model, octavo.recipes.blockwise())
optimizer = octavo.optim.AdamW(model.parameters(), moments="fp8")
model(torch.randn(8, 512)).sum().backward()
optimizer.step()
"""


def run(*command: str | Path, **options: object) -> str:
    left_out = {"PYTHONPATH", "COVERAGE_PROCESS_CONFIG"}
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    settings: dict = {"env": environment, "timeout": 300, "capture_output": True, "text": True, "check": False}
    result = subprocess.run(list(map(str, command)), **(settings | options))
    assert result.returncode == 0, result.stderr
    return result.stdout


def interpreter(version: str) -> str | None:
    """A Python of this version on the machine: this one, one on PATH, or one of pyenv's."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python")
    for candidate in (sys.executable, f"python{version}", *map(str, of_pyenv)):
        try:
            version_of_candidate = run(candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        except (OSError, AssertionError):  # absent, or a shim for another version
            continue
        if version_of_candidate.strip() == version:
            return candidate
    return None


def test_one_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert [PROJECT["version"]] == [octavo.__version__] == re.findall(r"^version: (\S+)$", citation, re.MULTILINE)


def test_classifiers_name_the_pythons_that_were_tested() -> None:
    rows = (ROOT / "README.md").read_text(encoding="utf-8").partition("| torch | Triton | Python |")[2].splitlines()
    tested = {cells[3].strip().rpartition(".")[0] for cells in (row.split("|") for row in rows) if len(cells) > 6}
    named = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", one)}
    assert tested - {"---", ""} == named


def test_each_extra_is_described() -> None:
    page = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| `octavo\[(\w+)\]` \|", page, re.MULTILINE))
    assert described == set(PROJECT["optional-dependencies"]) - {"dev", "docs"}


def test_the_lock_has_a_hashed_release_for_each_development_requirement() -> None:
    text = (ROOT / "locked.txt").read_text(encoding="utf-8")
    hashes = r"(?: \\\n    --hash=sha256:[0-9a-f]{64})+$"
    locked = re.findall(rf"^([a-z][a-z0-9-]+)==([^ ;]+)(?: ; [^\\\n]+)?{hashes}", text, re.MULTILINE)
    assert len(locked) == len(re.findall(r"^\w", text, re.MULTILINE))
    for requirement in [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]:
        if requirement.name not in ("octavo", "triton"):
            locked_versions = [version for name, version in locked if name == canonicalize_name(requirement.name)]
            assert any(map(requirement.specifier.contains, locked_versions)), f"{requirement}: run ./dev lock"
    assert not [name for name, _ in locked if name in ("torch", "triton") or name.startswith(("nvidia", "cuda"))]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    build = sys.executable, "-m", "hatchling", "build", "-d", folder, "-t"
    run(*build, "sdist", cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(*build, "wheel", cwd=sdist.with_suffix("").with_suffix(""))
    return folder


@pytest.mark.full
def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "octavo").rglob("*") if path.is_file()}
    assert held == {name for name in sources if "__pycache__" not in name} | {"octavo_command.py"}
    assert {"octavo/py.typed", "octavo/kernels/triton/configs.json"} <= held


@pytest.mark.full
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_wheel_installs_in_a_clean_environment(built: Path, tmp_path: Path, version: str) -> None:
    """The wheel computes by this environment's torch; of other Python versions, where torch is not, it compiles."""
    if (python := interpreter(version)) is None:
        pytest.skip(f"there is no Python {version} on this machine")
    (wheel,) = built.glob("*.whl")
    run(python, "-m", "venv", "--without-pip", tmp_path / "venv")
    its_python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", its_python, "install", "--no-deps", "--no-index", "-q", wheel)
    run(its_python, "-W", "error", "-m", "compileall", "-q", "-f", tmp_path / "venv" / "lib")
    assert "usage: octavo" in run(its_python.with_name("octavo"), "--help")
    if version == "{}.{}".format(*sys.version_info):
        (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        run(its_python, "-W", "error", "-c", USE, cwd=tmp_path)
        assert PROJECT["version"] in run(its_python.with_name("octavo"), "info", cwd=tmp_path)
