import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvevict.agent.manager import HistoryManager
from kvevict.agent.summarizers import (
    HFSummarizer,
    OpenAISummarizer,
    SummaryInput,
    attempt,
    build_summarizer,
    extractive,
)
from kvevict.errors import PolicyError

SPAN = [
    {"role": "user", "content": "Fix the login bug in src/auth.py, never touch the database."},
    {"role": "assistant", "content": "I read the file.\n[called read with {}]"},
    {"role": "tool", "content": "line 1\nError: 401 Unauthorized in verify()\nline 3"},
    {"role": "assistant", "content": "The root cause is the clock. Next I must run the tests."},
]


def test_extractive_quotes_and_is_deterministic():
    text = extractive(SPAN, 400)
    assert text == extractive(SPAN, 400)
    for fact in ("never touch the database", "src/auth.py", "root cause", "run the tests"):
        assert fact in text


@pytest.mark.parametrize("budget", [8, 30, 100, 1000])
def test_extractive_keeps_its_budget(budget):
    long = [{"role": "user", "content": f"Please decide on item {n}. " * 40} for n in range(50)]
    assert 0 < len(extractive(long, budget)) <= 3 * budget


def test_extractive_has_the_wanted_headings_and_the_users_language():
    request = SummaryInput(
        [{"role": "user", "content": "请修复登录错误。不要修改数据库。"}],
        "总结",
        ("目标", "下一步"),
    )
    text = extractive(request, 300)
    assert "## 目标" in text
    assert "请修复登录错误" in text


def test_extractive_says_nothing_about_nothing():
    assert extractive([], 100) == ""
    assert extractive([{"role": "user", "content": " "}], 100) == ""


def broken(messages, budget):
    raise ConnectionError("down")


@pytest.mark.parametrize(
    ("summarizer", "reason"),
    [
        (broken, "raised ConnectionError"),
        (lambda m, b: None, "None"),
        (lambda m, b: "", "empty"),
        (lambda m, b: " \n", "empty"),
        (lambda m, b: ("half", False), "incomplete"),
        (lambda m, b: ("", True), "empty"),
        (lambda m, b: (None, True), "None"),
        (lambda m, b: 7, "int"),
        (lambda m, b: ("a", True, 1), "tuple of 3"),
        (lambda m, b: "x" * 1000, "inflated"),
        (lambda: "no arguments", "raised TypeError"),
    ],
)
def test_every_failure_becomes_a_reason(summarizer, reason):
    outcome = attempt(summarizer, SummaryInput(SPAN), 100, len, 200)
    assert outcome.text is None
    assert reason in outcome.reason


def test_complete_answers_count():
    assert attempt(lambda m, b: ("fine", True), SummaryInput(SPAN), 100, len, 200).text == "fine"


@pytest.mark.parametrize(
    "name",
    ["llama", "openai:", "openai:ftp://x", "hf:", "openai:http://x,retries=0", "extractive:x"],
)
def test_unknown_summarisers_are_refused(name):
    with pytest.raises(PolicyError):
        build_summarizer(name)


def test_hf_is_lazy():
    assert isinstance(build_summarizer("hf:no/such-model"), HFSummarizer)


class Server:
    """A real HTTP server with the answers of a list; the last one repeats."""

    def __init__(self, *answers):
        self.requests = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, dict(self.headers), body))
                status, answer = answers[min(len(server.requests), len(answers)) - 1]
                if status == 0:  # hang up
                    self.connection.close()
                    return
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def said(text, reason="stop"):
    return 200, {"choices": [{"message": {"content": text}, "finish_reason": reason}]}


def test_openai_server_is_asked_with_key_model_and_budget(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    with Server(said("the summary")) as server:
        summarizer = build_summarizer(f"openai:{server.url},model=small,timeout=5")
        assert summarizer(SummaryInput(SPAN, "Summarise."), 77) == ("the summary", True)
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer from-the-environment"
    assert (body["model"], body["max_tokens"]) == ("small", 77)
    assert {m["role"] for m in body["messages"]} == {"user", "assistant"}
    assert body["messages"][-1]["content"] == "Summarise."


def test_openai_server_is_asked_again_after_passing_errors(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Server((503, {}), (429, {}), (0, b""), said("third time")) as server:
        summarizer = OpenAISummarizer(server.url, retries=4, wait=0.01, timeout=5)
        assert summarizer(SummaryInput(SPAN), 10)[0] == "third time"
    assert len(server.requests) == 4
    assert "Authorization" not in server.requests[0][1]


@pytest.mark.parametrize(
    ("answer", "tries"),
    [((400, {}), 1), ((401, {}), 1), ((500, {}), 2), ((200, {"choices": []}), 1)],
)
def test_openai_server_that_refuses_is_a_failure(answer, tries):
    with Server(answer) as server:
        summarizer = OpenAISummarizer(server.url, retries=2, wait=0.01, timeout=5)
        assert attempt(summarizer, SummaryInput(SPAN), 10, len, 100).text is None
    assert len(server.requests) == tries


@pytest.mark.parametrize("answer", [said("cut", "length"), said(None), (200, b"no json")])
def test_openai_answers_without_a_whole_text_are_failures(answer):
    with Server(answer) as server:
        summarizer = OpenAISummarizer(server.url, retries=1, timeout=5)
        assert attempt(summarizer, SummaryInput(SPAN), 10, len, 100).text is None


def test_openai_time_out_is_a_failure():
    with Server(said("never")) as server:
        server.http.shutdown()  # connections are accepted by the system, nobody answers
        summarizer = OpenAISummarizer(server.url, retries=1, timeout=0.2)
        outcome = attempt(summarizer, SummaryInput(SPAN), 10, len, 100)
    assert "Timeout" in outcome.reason


def test_a_manager_compacts_with_a_server():
    history = [{"role": "user", "content": "go"}]
    for n in range(20):
        history.append({"role": "assistant", "content": f"step {n} " * 100})
        history.append({"role": "user", "content": f"on {n}"})
    with Server(said("everything is fine")) as server:
        manager = HistoryManager(
            "codex_local", window=5_000, max_output=500, summarizer=f"openai:{server.url}"
        )
        prepared = manager.prepare(history)
    assert "everything is fine" in prepared.messages[-1]["content"][0]["text"]
    assert prepared.report.summary_calls[0][1] > 0
