import json

import pytest
from typer.testing import CliRunner

from kvevict.agent.cli import app
from kvevict.agent.examples import login_bug
from kvevict.agent.formats import to_normal
from kvevict.agent.replay import replay
from kvevict.agent.timeline import timeline


def run(*args, stdin=None):
    return CliRunner().invoke(app, [str(a) for a in args], input=stdin)


@pytest.fixture
def session(tmp_path):
    file = tmp_path / "session.json"
    file.write_text(json.dumps(login_bug()))
    return file


def test_demo_shows_the_outcome_each_system_is_known_for():
    result = run("demo", "--json")
    assert result.exit_code == 0
    rows = {row["system"]: row for row in json.loads(result.stdout)["rows"]}
    claude, codex = rows["Claude Code"], rows["Codex"]
    prune, compact = rows["OpenCode prune"], rows["OpenCode compact"]
    assert all(15_000 < row["tokens_before"] < 16_000 for row in rows.values())
    assert claude["messages"] == 26  # every call is still there
    assert claude["results_cleared"] >= 2
    assert codex["messages"] == 4
    assert codex["outcome"].startswith("4 messages left: 2 of the user's own, and a summary")
    assert codex["left"][-1].startswith("user")  # the summary comes last, as a user message
    assert prune["messages"] == 26
    assert prune["restorable"] == prune["results_cleared"] == 2
    assert compact["last_user_message_kept"]
    assert "Good find" in compact["left"][-1]


def test_demo_prints_a_table_and_a_page_that_loads_nothing(tmp_path):
    page = tmp_path / "demo.html"
    result = run("demo", "--html", page)
    assert result.exit_code == 0
    assert "codex_local" in result.stdout
    html = page.read_text()
    assert html.startswith("<!doctype html>")
    assert "http" not in html.replace("http-equiv", "")
    assert "<script" not in html


def test_example_is_the_session_that_it_says_it_is():
    history = to_normal(login_bug())
    sizes = [len(m.text) + sum(len(b.tool or "") for b in m.calls) for m in history]
    results = [m for m, _ in history.find("tool_result")]
    assert len(history) == 26
    assert [m + 1 for m in results] == [5, 8, 13, 21, 26]
    assert [m + 1 for m in history.users] == [2, 10]
    assert sum(sizes) / 3 == pytest.approx(15_400, rel=0.02)
    assert sum(sizes[m] for m in results) / sum(sizes) == pytest.approx(0.81, abs=0.01)


@pytest.mark.parametrize("command", ["plan", "validate", "replay", "advise"])
def test_json_is_one_object_with_its_four_keys(session, command):
    result = run(command, session, "--json")
    report = json.loads(result.stdout)
    assert list(report) == ["command", "config", "versions", "rows"]
    assert report["command"] == f"agent {command}"
    assert report["versions"]["kvevict"]
    assert report["config"]["format"] == "openai-chat"
    assert result.exit_code == 0
    again = run(command, session, "--json")
    assert again.stdout == result.stdout


@pytest.mark.parametrize("command", ["plan", "validate", "replay", "advise", "policies"])
def test_tables_are_printed_for_people(session, command):
    result = run(command, session) if command != "policies" else run(command)
    assert result.exit_code == 0
    assert result.stdout.strip()


def test_apply_writes_the_request_and_keeps_its_state(session, tmp_path):
    out, state = tmp_path / "out.json", tmp_path / "state.json"
    args = ["apply", session, "--policy", "complexity_trap_mask:m=2", "--out", out]
    result = run(*args, "--state", state, "--json")
    assert result.exit_code == 0, result.stderr
    row = json.loads(result.stdout)["rows"][0]
    assert row["freed_tokens"] > 0
    written = json.loads(out.read_text())
    assert len(written) == 26
    first = out.read_bytes()
    assert run(*args, "--state", state).exit_code == 0
    assert out.read_bytes() == first
    piped = run("apply", "-", "--policy", "complexity_trap_mask:m=2", stdin=session.read_text())
    assert json.loads(piped.stdout) == written


def test_apply_leaves_an_untouched_history_as_it_was(session):
    result = run("apply", session, "--policy", "full")
    assert json.loads(result.stdout) == login_bug()


def test_validate_tells_and_repairs(tmp_path):
    file, out = tmp_path / "bad.json", tmp_path / "good.json"
    bad = [
        {"role": "user", "content": "go \ud800"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "read", "input": {}}],
        },
        {"role": "user", "content": "next"},
    ]
    file.write_text(json.dumps(bad))
    result = run("validate", file, "--json")
    assert result.exit_code == 1
    assert {row["code"] for row in json.loads(result.stdout)["rows"]} == {"I2", "I8"}
    assert run("validate", file).exit_code == 1
    result = run("validate", file, "--repair", "--out", out)
    assert result.exit_code == 0
    assert run("validate", out).exit_code == 0


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "empty"),
        ("{", "no JSON"),
        ('{"a": 1}\n{"b":', "line 2"),
        ("7", "not recognised"),
        ('[{"role": "wizard", "content": ""}]', "messages[0].role"),
        ('[{"role": "user", "content": [{"type": "ray"}]}, {"role": "user"}]', ""),
        ("[" * 100_000, "nested"),
        ('[{"role": "assistant", "content": "", "tool_calls": [{"function": 3}]}]', ""),
        ("\x00\xff", ""),
    ],
)
@pytest.mark.parametrize("command", ["validate", "plan", "advise", "replay"])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, command, text, hint):
    file = tmp_path / "x.json"
    file.write_bytes(text.encode("latin-1"))
    result = run(command, file)
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert hint in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("plan", "FILE", "--policy", "nothing"),
        ("plan", "FILE", "--policy", "pi:tea=1"),
        ("plan", "FILE", "--window", "many"),
        ("plan", "FILE", "--format", "morse"),
        ("plan", "FILE", "--counter", "toes"),
        ("replay", "FILE", "--prices", "gold"),
        ("apply", "FILE", "--policy", "full", "--json"),
        ("apply", "FILE", "--policy", "full", "--out", "/nowhere/at/all"),
        ("plan", "/nowhere/at/all"),
        ("plan", "FILE", "--no-such-option"),
        ("advise",),
    ],
)
def test_wrong_options_exit_with_2(session, args):
    result = run(*[session if a == "FILE" else a for a in args])
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)


def test_budget_below_the_floor_names_it_and_exits_with_1(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps([{"role": "user", "content": "word " * 9_000}]))
    result = run("plan", file, "--policy", "codex_local", "--window", "4k", "--max-output", "1k")
    assert result.exit_code == 1, (result.stdout, result.stderr)


def test_page_escapes_what_comes_from_outside():
    history = to_normal(login_bug())
    page = timeline(history, [replay(history, "full")], "<script>alert(1)</script> \ud800")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    page.encode()


def test_page_of_the_real_session_stays_small(pi_session):
    history = to_normal(pi_session)
    page = timeline(history, [replay(history, "complexity_trap_mask:polling=10")])
    assert len(page) < 400_000
    assert "masked" in page
