"""Type-check the package as it is installed: `python -m benchmarks.types`.

The rooms lie beside the package in a checkout, which mypy cannot follow; so the package is
installed into a temporary folder first and checked there.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Install into a temporary folder and run mypy --strict on the package."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        # From a copy: building in the tree would leave a build/ folder that makes stale wheels.
        files = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for name in files:
            if (ROOT / name).is_file():
                target = source / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((ROOT / name).read_bytes())
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--target", f"{folder}/types", str(source)], check=True)
        mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        cache = os.environ.get("MYPY_CACHE_DIR", str(ROOT / ".mypy_cache"))
        command = [*mypy, "--cache-dir", cache, "-p", "kvevict"]
        return subprocess.run(command, cwd=f"{folder}/types", check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
