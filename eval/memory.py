"""memory: bytes that this process holds."""

from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes, None where it cannot be read."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(found[0]) * 1024 if found else None
