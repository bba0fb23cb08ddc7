"""What is installed: the files of the distributions, and the backend's name."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # left out of `make test-fast`

ROOT = Path(__file__).parent.parent
NOT_SOURCE = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")


def sources() -> set[str]:
    """Python files that a distribution must hold, as they are named in it."""
    folders = {"vescale_compile": "vescale_compile", "passes": "vescale_compile/passes"}
    folders["runtime"] = "vescale_compile/runtime"
    return {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=NOT_SOURCE)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module", params=["tree", "sdist"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, sdist: Path) -> Path:
    """A wheel made from a checkout, and one made from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    source = sdist
    if request.param == "tree":
        source = Path(shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=NOT_SOURCE))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, source],
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_source_file_once_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted({*sources(), "vescale_compile/py.typed"})


def test_linked_packages_are_real_files_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(sources()):
            top = name.removeprefix("vescale_compile/")
            source = ROOT / (top if top.startswith(("passes/", "runtime/")) else name)
            assert archive.read(name) == source.read_bytes(), name


def test_the_wheel_holds_the_licence_and_names_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()


def test_the_wheel_registers_the_backend(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert archive.read(points).decode().split("\n")[:2] == [
            "[torch_dynamo_backends]",
            "vescale = vescale_compile.backend:vescale",
        ]


def test_the_source_distribution_holds_no_links(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    assert sources() <= {member.name.partition("/")[2] for member in members}


def test_the_backend_is_found_by_name_without_importing_the_package() -> None:
    listed = "import sys, torch\nprint('vescale' in torch.compiler.list_backends(), 'vescale_compile' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", listed], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"]
