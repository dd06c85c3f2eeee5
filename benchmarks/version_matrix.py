"""Run the suite on every transformers release in range: `python -m benchmarks.version_matrix`.

For each release a virtual environment is made that sees this one's packages (torch is not fetched
again) and has its own transformers on top. Only tests that touch transformers run. A release whose
requirements pip cannot find is installed without them, and its row says so.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parent.parent
# Nothing in these depends on transformers.
INDEPENDENT = ("tests/agent", "tests/kernels", "tests/policies")


def floor() -> Version:
    """Return the oldest transformers that pyproject allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = next(x for x in project["dependencies"] if x.startswith("transformers"))
    found = re.search(r">=([\d.]+)", wanted)
    assert found is not None, wanted
    return Version(found[1])


def known_releases() -> list[Version]:
    """Return pip's final releases from the floor on, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "transformers"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(x for x in done.stdout.splitlines() if x.startswith("Available versions:"))
    releases = [Version(x) for x in line.partition(":")[2].replace(",", " ").split()]
    return sorted(x for x in releases if x >= floor() and not x.is_prerelease and x.major < 6)


def make(release: Version, folder: Path) -> tuple[Path, bool]:
    """Make an environment with this release over the packages of the present one.

    Returns:
        Its python, and whether pip found all that the release requires.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    own = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    shared = [str(ROOT), sysconfig.get_paths()["purelib"]]
    Path(own.stdout.strip(), "zz_shared.pth").write_text("\n".join(shared) + "\n")
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    whole = subprocess.run([*pip, f"transformers=={release}"], check=False).returncode == 0
    if not whole:
        subprocess.run([*pip, "--no-deps", f"transformers=={release}"], check=True)
    return python, whole


def run(python: Path, whole: bool, release: Version, arguments: list[str]) -> dict[str, object]:
    """Run the tests in one environment; one row."""
    ask = "import transformers; print(transformers.__version__)"
    got = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    if Version(got.stdout.strip()) != release:
        raise RuntimeError(f"the environment has transformers {got.stdout.strip()}, not {release}")
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    command += [f"--ignore={x}" for x in INDEPENDENT]
    began = time.perf_counter()
    # From 5.25 on the package `kernels` is required, unless its use is switched off.
    environment = {**os.environ, **({} if whole else {"USE_HUB_KERNELS": "NO"})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines() or ["no output"]
    if done.returncode:
        sys.stdout.write(done.stdout[-8000:] + done.stderr[-2000:])
    return {
        "transformers": str(release),
        "requirements": "all" if whole else "not all found",
        "passed": done.returncode == 0,
        "summary": lines[-1].strip("= "),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> int:
    """Run the matrix; 1 if a release fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--floor", action="store_true", help="only the oldest release")
    which.add_argument("--ends", action="store_true", help="only the oldest and the newest")
    which.add_argument("--only", nargs="+", type=Version, metavar="VERSION")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("tests", nargs="*", help="handed to pytest; tests/ by default")
    chosen = parser.parse_args()
    if chosen.only or chosen.floor:
        releases = chosen.only or [floor()]
    else:
        releases = known_releases()
        releases = [releases[0], releases[-1]] if chosen.ends else releases
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    rows = []
    for release in releases:
        with tempfile.TemporaryDirectory() as folder:
            python, whole = make(release, Path(folder, "venv"))
            rows.append(run(python, whole, release, chosen.tests))
        print(json.dumps(rows[-1]), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
