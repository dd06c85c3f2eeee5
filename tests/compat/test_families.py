"""Every family of transformers is served exactly or refused by name; docs/models.md says which."""

import importlib.util
from pathlib import Path
from typing import Any

import examine
import families
import pytest
import transformers

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location(
    "kvevict_models_table", ROOT / "benchmarks" / "models_table.py"
)
assert _spec is not None
assert _spec.loader is not None
table: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(table)

DOCUMENTED = table.parse(table.TABLE.read_text())
# One of each kind for the default run; the others are slow.
DAILY = {
    *("bart", "bloom", "cohere", "deepseek_v2", "diffllama", "doge", "falcon_h1", "gemma2"),
    *("gemma3_text", "gemma3n_text", "glm", "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite"),
    *("jamba", "llama", "llama + dynamic rope", "llama4_text", "mistral", "nanochat", "opt"),
    *("phi3 + longrope", "qwen3_moe", "qwen3_next", "smollm3"),
}


def _cases() -> list[Any]:
    slow = pytest.mark.slow
    return [
        pytest.param(name, marks=() if name in DAILY else slow) for name in sorted(families.names())
    ]


@pytest.mark.parametrize("name", _cases())
def test_a_family_is_exact_or_refused_as_documented(name: str) -> None:
    row = examine.examine(name)
    if transformers.__version__ != _documented_version():
        return  # the suite has run; the table is of another release
    assert str(row) == DOCUMENTED.get(name), "run python -m benchmarks.models_table"


def test_the_table_has_every_family() -> None:
    if transformers.__version__ != _documented_version():
        pytest.skip(f"the table is of transformers {_documented_version()}")
    assert set(DOCUMENTED) == set(families.names())


def test_the_daily_families_exist() -> None:
    assert set(families.names()) >= DAILY


def _documented_version() -> str:
    return table.TABLE.read_text().partition("(transformers ")[2].partition(";")[0]
