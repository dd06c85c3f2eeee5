"""The wheel holds exactly the checkout's modules, and works from anywhere."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "models", "eval")


def modules_of_checkout() -> set[str]:
    found = {str(p.relative_to(ROOT)) for p in (ROOT / "kvevict").rglob("*.py")}
    for room in ROOMS:
        found |= {f"kvevict/{p.relative_to(ROOT)}" for p in (ROOT / room).rglob("*.py")}
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: an in-tree build/ folder makes stale wheels.
    copy = tmp_path_factory.mktemp("source") / "kvevict"
    keep = shutil.ignore_patterns(".git", "__pycache__", "*.egg-info", "build", ".*_cache", "tests")
    shutil.copytree(ROOT, copy, ignore=keep)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(out), str(copy)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_modules_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {n for n in names if n.endswith(".py")} == modules_of_checkout()
    assert "kvevict/py.typed" in names
    assert any(n.endswith("LICENSE") for n in names)
    others = {n.split("/")[0] for n in names}
    assert {n for n in others if not n.endswith(".dist-info")} == {"kvevict"}


@pytest.mark.slow
def test_the_wheel_names_its_version_and_its_command(wheel: Path) -> None:
    import kvevict

    with zipfile.ZipFile(wheel) as archive:
        folder = next(n for n in archive.namelist() if n.endswith("METADATA")).rsplit("/", 1)[0]
        metadata = archive.read(f"{folder}/METADATA").decode()
        entry = archive.read(f"{folder}/entry_points.txt").decode()
    assert f"Version: {kvevict.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "kvevict = kvevict.cli:main" in entry


@pytest.mark.slow
@pytest.mark.parametrize("where", ["elsewhere", "checkout"])
def test_an_installed_wheel_imports_every_module(wheel: Path, tmp_path: Path, where: str) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import kvevict, kvevict.cache, kvevict.models.patch, kvevict.kernels.library\n"
        "import kvevict.eval.perplexity, kvevict.agent\n"
        f"assert kvevict.models.patch.__file__.startswith({str(target)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=tmp_path if where == "elsewhere" else ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_every_folder_of_modules_is_a_package_of_the_wheel() -> None:
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {str(Path(m).parent).replace("/", ".") for m in modules_of_checkout()}
    assert set(settings["packages"]) == folders


def test_a_checkout_finds_its_rooms_from_the_root_and_from_elsewhere(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import kvevict, kvevict.kernels, kvevict.models.small, kvevict.eval\n"
        f"assert kvevict.models.small.__file__ == {str(ROOT / 'models' / 'small.py')!r}\n"
    )
    for cwd in (ROOT, tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr


def test_a_folder_named_kernels_does_not_shadow_the_installed_one(tmp_path: Path) -> None:
    # Hugging Face's `kernels` is on many GPU machines; ours lies at the checkout's top.
    other = tmp_path / "kernels"
    other.mkdir()
    (other / "__init__.py").write_text("name = 'the real one'\n")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.append({str(tmp_path)!r})\n"
        "import kernels; assert kernels.name == 'the real one'\n"
        "import kvevict.kernels.library\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_every_dependency_has_its_licence_on_the_page(root: Path) -> None:
    from benchmarks.licences import needed

    page = (root / "docs" / "licences.md").read_text()
    missing = [name for name in needed() if f"| {name} | " not in page]
    assert missing == [], "run `python -m benchmarks.licences`"
