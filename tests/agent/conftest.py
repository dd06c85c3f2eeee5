import json
from pathlib import Path

import pytest
from hypothesis import settings

DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "trajectories"
FILES = {
    "pi_before-compaction.jsonl": "pi",
    "cline_session.messages.json": "cline",
    "oh_sonnet.json": "openhands",
    "cc_representative.jsonl": "claude-code",
    "sweagent_marshmallow1867_window100.traj": "swe-agent",
    "tau_airline_gpt4o_task2_trial1.json": "openai-chat",
}

settings.register_profile("agent", deadline=None, derandomize=True)
settings.load_profile("agent")


def load(name: str) -> object:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"no shared trajectory {name}: recorded sessions are not part of the project")
    text = path.read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return json.loads(text)


@pytest.fixture(params=sorted(FILES))
def trajectory(request):
    """A recorded session and the format that it is in."""
    return load(request.param), FILES[request.param]


@pytest.fixture(scope="session")
def pi_session():
    """The recorded coding session of 990 messages, with usage."""
    return load("pi_before-compaction.jsonl")
