"""Write docs/models.md from the model matrix: `python -m benchmarks.models_table`.

Every causal language model family of the installed transformers is built tiny and random and put
through the suite in tests/compat; a test compares the file with what the suite finds.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "models.md"

_TEXT = """# Models

Which families of transformers kvevict serves, found by running each one, tiny and random, through
the suite in tests/compat (transformers {version}; `python -m benchmarks.models_table` writes this
file, `pytest tests/compat/test_families.py` compares it, `-m slow` for all rows).

- **served: yes** means that all of this was shown: with budget to spare every policy gives a
  DynamicCache's logits; the budget is never exceeded; StreamingLLM gives the same for any chunk
  size and equals a brute-force oracle; H2O's scores equal eager attention's column sums, and its
  evictions those of a slow loop.
- **in-cache positions: no** means learned absolute positions, or a temperature that follows the
  length: StreamingLLM and H2O run with `positions="original"`, within the trained length.
- **padded rows: no** means that a left-padded batch raises `UnsupportedModelError`.
- **refused** means that `patch` raises `UnsupportedModelError` and names the missing part: the
  *bridge* (attention that does not go through transformers' AttentionInterface), the *positions*,
  or the *scores* (attention to other keys than are cached, or with options that are not honoured).
- **not built** means that the suite makes no tiny model of it; `patch` checks it when it meets one.

No list of names decides: `patch` probes the model (which layers pass through the attention
function, with which options, masks and keys; how keys turn with the position) and runs a self-check
of short forwards against a DynamicCache. Layers with a sliding window, and recurrent ones, keep
transformers' own cache; only layers of full attention evict.

Assisted and prompt-lookup decoding give what plain decoding gives, tokens and kept sets; "no
drafts" marks families whose recurrent or convolution layers cannot take a draft back in the release
of this table (5.24): they raise there. From 5.25 on recurrent ones can.

{counts}

| family | served | in-cache positions | padded rows | remarks |
|---|---|---|---|---|
{rows}
"""


def render(rows: list[object], version: str) -> str:
    """Return the whole file."""
    served = [getattr(row, "served", "") for row in rows]
    counts = f"{len(rows)} families and variants: " + ", ".join(
        f"{served.count(kind)} {kind}" for kind in ("yes", "refused", "not built")
    ).replace(" yes", " served")
    lines = "\n".join(str(row) for row in rows)
    return _TEXT.format(version=version, counts=counts + ".", rows=lines)


def parse(text: str) -> dict[str, str]:
    """Return the table's lines by family."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip(): line for line in lines if "| family |" not in line}


def main() -> int:
    """Examine every family and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="print these rows, write nothing")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "compat"))
    import families
    import transformers
    from examine import examine

    transformers.logging.set_verbosity_error()
    rows, failed = [], []
    for name in chosen.only or families.names():
        try:
            rows.append(examine(name))
        except Exception as error:  # the run goes on to the other families
            failed.append(name)
            print(f"{name}: FAILED {error!r}", flush=True)
            continue
        print(rows[-1], flush=True)
    if not chosen.only and not failed:
        TABLE.write_text(render(rows, transformers.__version__))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
