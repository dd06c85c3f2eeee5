"""The one-way doors between the rooms, on the syntax tree; and what an import may load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "models", "eval")
# Which of our rooms each room may import; everything else of ours is a closed door.
ALLOWED = {
    "core": {"core"},
    "kernels": {"kernels"},
    "models": {"core", "agent", "kernels", "models"},
    "eval": {"core", "agent", "kernels", "models", "eval"},
    "agent": {"core", "agent"},
}
# The two that may look down: the command line, and the package's lazy names.
EXEMPT = {"kvevict/cli.py", "kvevict/__init__.py"}


def files(*folders: str) -> list[Path]:
    return sorted(p for f in folders for p in (ROOT / f).rglob("*.py"))


def room_of_path(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] in ROOMS:
        return parts[0]
    return "agent" if parts[:2] == ("kvevict", "agent") else "core"


def room_of_module(name: str) -> str | None:
    """Return the room that a module belongs to, None for one that is not ours."""
    parts = name.split(".")
    if parts[0] in (*ROOMS, "benchmarks", "tests"):
        return "outside"  # by its bare name: works in a checkout only
    if parts[0] != "kvevict":
        return None
    if len(parts) > 1 and parts[1] in (*ROOMS, "agent"):
        return parts[1]
    return "core"


def imports(path: Path) -> Iterator[tuple[int, str, int]]:
    """Yield line, module and level of every import, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield node.lineno, base, node.level
            if base == "kvevict":  # `from kvevict import models` names a room
                for alias in node.names:
                    yield node.lineno, f"kvevict.{alias.name}", node.level


def violations(path: Path, room: str) -> list[str]:
    found = []
    for line, name, _ in imports(path):
        target = room_of_module(name)
        if target is not None and target not in ALLOWED[room]:
            found.append(f"{path.name}:{line} imports {name}")
    return found


@pytest.mark.parametrize("path", files("kvevict", *ROOMS), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    if str(path.relative_to(ROOT)) in EXEMPT:
        pytest.skip("may import downwards")
    if path.name in ("cli.py", "cli_output.py") and room_of_path(path) == "agent":
        pytest.skip("the agent's part of the command line")
    assert violations(path, room_of_path(path)) == []


def test_a_planted_violation_is_seen(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("def f():\n    from kvevict.models.patch import patch\n    return patch\n")
    assert violations(planted, "core") == ["planted.py:2 imports kvevict.models.patch"]
    assert violations(planted, "kernels")
    assert violations(planted, "eval") == []
    planted.write_text("from kvevict import models\nimport kernels.decode\n")
    assert len(violations(planted, "core")) == 2
    planted.write_text("import kvevict.kernels.library\n")
    assert violations(planted, "core")
    assert violations(planted, "models") == []


def test_policies_need_neither_torch_nor_transformers() -> None:
    for path in [*files("kvevict/policies"), ROOT / "kvevict/policy.py", ROOT / "kvevict/slots.py"]:
        names = {name.split(".")[0] for _, name, _ in imports(path)}
        assert names.isdisjoint({"torch", "transformers", "triton"}), path


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_have_no_init_file(room: str) -> None:
    # A kernels/__init__.py at the top breaks `import transformers` beside Hugging Face's kernels.
    assert list((ROOT / room).rglob("__init__.py")) == []


def test_tests_are_no_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_no_relative_imports() -> None:
    for path in files("kvevict", *ROOMS, "benchmarks", "tests"):
        assert [name for _, name, level in imports(path) if level] == [], path


def run(code: str, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


HEAVY = "('torch', 'transformers', 'triton', 'tokenizers', 'safetensors', 'matplotlib')"


@pytest.mark.parametrize(
    "module", ["kvevict", "kvevict.agent", "kvevict.policies", "kvevict.policy", "kvevict.errors"]
)
def test_light_imports_load_no_torch(module: str) -> None:
    run(
        f"import sys, {module}\n"
        + f"loaded = [m for m in {HEAVY} if m in sys.modules]\n"
        + "assert not loaded, loaded"
    )


def test_parsing_a_policy_loads_no_torch() -> None:
    run(
        "import sys, kvevict\n"
        "assert kvevict.parse('h2o:heavy=4,recent=4').capacity == 8\n"
        "from kvevict.policies import Full, H2O, StreamingLLM, Window\n"
        "assert 'torch' not in sys.modules"
    )


def test_importing_everything_has_no_side_effects(tmp_path: Path) -> None:
    run(
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import kvevict, kvevict.agent, kvevict.cache\n"
        "import kvevict.models.patch, kvevict.models.stream\n"
        "from transformers import AttentionInterface\n"
        "assert 'kvevict' not in AttentionInterface()\n"
        "changed = {k for k in os.environ if before.get(k) != os.environ[k]}\n"
        "assert not [k for k in changed if 'KVEVICT' in k], changed\n"
    )


def test_public_names_are_there_and_lazy_ones_resolve() -> None:
    run(
        "import kvevict\n"
        "for name in kvevict.__all__:\n"
        "    assert getattr(kvevict, name) is not None, name\n"
        "assert sorted(kvevict.__all__) == dir(kvevict)\n"
        "try:\n    kvevict.nothing\n"
        "except AttributeError as error:\n    assert 'nothing' in str(error)\n"
        "else:\n    raise SystemExit('no error')\n"
    )
