"""The server answers the real openai client on loopback, under the policy; slow: loads a model."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvevict import KvevictError, PolicyError

POLICY = "streaming_llm:sinks=2,window=14"


def test_bad_settings_raise_before_anything_starts() -> None:
    from kvevict.models.serve import make_server

    with pytest.raises(PolicyError):
        make_server("nowhere", "no_such_policy")
    with pytest.raises(KvevictError, match="continuous batching"):
        make_server("nowhere", POLICY, continuous_batching=True)


@pytest.fixture(scope="module")
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded real model, cut to three layers: fast, and with its real tokenizer."""
    import kvevict

    model, tokenizer = kvevict.load()
    path = tmp_path_factory.mktemp("served") / "model"
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:3]
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path, address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name, reason='pip install "kvevict[serve]"')
    host, _, port = address.partition(":")
    command = [sys.executable, "-m", "kvevict.cli", "serve", str(folder), "--policy", POLICY]
    command += ["--host", host, "--port", port, "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        started = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                break
            except OSError:
                assert started.poll() is None, log.read_text()
                assert time.monotonic() < deadline, "the server did not start: " + log.read_text()
                time.sleep(0.2)
        yield
    finally:
        started.terminate()
        started.wait(30)


@pytest.mark.slow
def test_the_openai_client_gets_what_generate_gives(
    server: None, folder: Path, address: str
) -> None:
    import openai
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvevict import patch

    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none")
    messages = [
        {"role": "user", "content": "Write a long story about a lighthouse and its keeper."}
    ]
    asked: dict[str, Any] = {"model": str(folder), "messages": messages, "max_tokens": 24}
    whole = client.chat.completions.create(**asked, temperature=0)
    pieces = client.chat.completions.create(**asked, temperature=0, stream=True)
    streamed = "".join(x.choices[0].delta.content or "" for x in pieces if x.choices)
    text = whole.choices[0].message.content
    assert streamed == text

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs["input_ids"].shape[1]

    def answer() -> str:
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        return tokenizer.decode(out[0, length:], skip_special_tokens=True)

    with patch(model, POLICY):
        assert answer() == text
    assert answer() != text  # the policy was in force


@pytest.mark.slow
def test_a_second_request_starts_afresh(server: None, folder: Path, address: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none")
    asked: dict[str, Any] = {"model": str(folder), "max_tokens": 8, "temperature": 0}
    messages = [{"role": "user", "content": "Name three rivers."}]
    answers = [
        client.chat.completions.create(**asked, messages=messages).choices[0].message.content
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
