"""Run the README's commands as a newcomer would: `python -m benchmarks.fresh_machine`.

Each command block of the README that starts with `pip install` is run in a copy of the checkout,
in an empty HOME and a new virtual environment, and timed; what it leaves behind is listed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
_KEPT = (
    "LANG",
    "LC_ALL",
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_CONFIG_FILE",
)
_KEPT += ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")


def commands() -> list[str]:
    """Return the README's blocks that install and run something."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```(?:sh|bash|console)?\n(pip install .*?)\n```", text, re.DOTALL)
    if not blocks:
        raise SystemExit("README.md has no block that starts with `pip install`")
    return blocks


def copy(target: Path) -> None:
    """Copy the checkout's files, those of git alone."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())


def run(command: str, timeout: float) -> dict[str, object]:
    """Run one command on a fresh machine's like; one row."""
    with tempfile.TemporaryDirectory() as folder:
        home, checkout, venv = (Path(folder, x) for x in ("home", "checkout", "venv"))
        home.mkdir()
        checkout.mkdir()
        copy(checkout)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        environment = {k: os.environ[k] for k in _KEPT if k in os.environ}
        environment |= {"HOME": str(home), "PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin"}
        rows: dict[str, object] = {"command": command}
        for part in command.split(" && "):
            began = time.perf_counter()
            done = subprocess.run(
                ["bash", "-c", part],
                cwd=checkout,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
            name = "install" if part.startswith("pip install") else part.split()[0]
            rows[f"{name}_seconds"] = round(time.perf_counter() - began, 1)
            rows["code"] = done.returncode
            sys.stderr.write(f"$ {part}\n{done.stdout[-3000:]}{done.stderr[-3000:]}\n")
            if done.returncode:
                break
        rows["left_in_home"] = sorted(
            str(x.relative_to(home)) for x in home.glob("*/*") if x.parent.name != ".cache"
        ) + sorted(str(x.relative_to(home)) for x in home.glob(".cache/*"))
        return rows


def main() -> int:
    """Run all, or the one named by its number; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, help="number of the command, from 1")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each part")
    chosen = parser.parse_args()
    found = commands()
    found = found if chosen.only is None else [found[chosen.only - 1]]
    rows = [run(command, chosen.timeout) for command in found]
    print(json.dumps(rows, indent=1))
    return 1 if any(row["code"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
