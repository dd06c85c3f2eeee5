import os

import pytest

from kvevict.agent.memory import MemoryTool


@pytest.fixture
def tool(tmp_path):
    return MemoryTool(tmp_path / "memory")


def run(tool, command, **arguments):
    return tool.call({"command": command, **arguments})


def good(tool, command, **arguments):
    text, is_error = run(tool, command, **arguments)
    assert not is_error, text
    return text


def test_life_of_a_file(tool):
    assert "/memories" in good(tool, "view", path="/memories")
    good(tool, "create", path="/memories/a/notes.md", file_text="one\ntwo\nthree")
    assert good(tool, "view", path="/memories/a/notes.md").endswith(
        "     1\tone\n     2\ttwo\n     3\tthree"
    )
    assert good(tool, "view", path="/memories/a/notes.md", view_range=[2, -1]).endswith("\tthree")
    text = good(tool, "str_replace", path="/memories/a/notes.md", old_str="two", new_str="2")
    assert text.startswith("The memory file has been edited.")
    good(tool, "insert", path="/memories/a/notes.md", insert_line=0, insert_text="zero\n")
    assert (tool.folder / "a" / "notes.md").read_text() == "zero\none\n2\nthree"
    good(tool, "rename", old_path="/memories/a/notes.md", new_path="/memories/b.md")
    assert "/memories/b.md" in good(tool, "view", path="/memories")
    good(tool, "delete", path="/memories/a")
    good(tool, "delete", path="/memories/b.md")
    assert not list(tool.folder.iterdir())


@pytest.mark.parametrize(
    ("command", "arguments", "answer"),
    [
        ("view", {"path": "/memories/no"}, "does not exist"),
        ("create", {"path": "/memories/a", "file_text": "x"}, "already exists"),
        ("str_replace", {"path": "/memories/a", "old_str": "zz", "new_str": ""}, "did not appear"),
        ("str_replace", {"path": "/memories/a", "old_str": "x", "new_str": ""}, "lines: [1, 2]"),
        ("str_replace", {"path": "/memories/a", "old_str": "", "new_str": ""}, "did not appear"),
        ("insert", {"path": "/memories/a", "insert_line": 9, "insert_text": "y"}, "[0, 2]"),
        ("insert", {"path": "/memories/a", "insert_line": True, "insert_text": "y"}, "[0, 2]"),
        ("view", {"path": "/memories/a", "view_range": [3, 1]}, "[1, 2]"),
        ("view", {"path": "/memories/a", "view_range": "x"}, "list of two"),
        ("delete", {"path": "/memories"}, "cannot be deleted"),
        ("delete", {"path": "/memories/"}, "cannot be deleted"),
        ("rename", {"old_path": "/memories/a", "new_path": "/memories/a"}, "already exists"),
        ("rename", {"old_path": "/memories/d", "new_path": "/memories/d/x"}, "lies inside"),
        ("create", {"path": "/memories/a/b", "file_text": "x"}, "is a file"),
        ("create", {"path": "/memories/d", "file_text": "x"}, "already exists"),
        ("create", {"path": "/memories/t", "file_text": 7}, "must be a text"),
        ("create", {"path": "/memories/t"}, "wrong parameters"),
        ("view", {"path": "/memories/a", "shell": "rm"}, "wrong parameters"),
        ("chmod", {"path": "/memories/a"}, "unknown command"),
        (None, {}, "unknown command"),
    ],
)
def test_wrong_commands_are_answered_not_raised(tool, command, arguments, answer):
    good(tool, "create", path="/memories/a", file_text="x\nx")
    good(tool, "create", path="/memories/d/f", file_text="x")
    text, is_error = run(tool, command, **arguments)
    assert is_error
    assert answer in text


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "memories/a",
        "/memories/../secret",
        "/memories/a/../../secret",
        "/memories/%2e%2e/secret",
        "/memories/..%2fsecret",
        "/memories/./a",
        "/memories//a",
        "/memories\\..\\secret",
        "/memories/a\0b",
        "/memoriesX/a",
        "/memories/" + "n" * 300,
        "/memories/" + "d/" * 50 + "x",
        "/memories/new\nline",
        "",
        7,
        None,
    ],
)
@pytest.mark.parametrize("command", ["view", "create", "delete"])
def test_no_path_leads_out(tool, tmp_path, command, path):
    (tmp_path / "secret").write_text("secret")
    arguments = {"path": path} | ({"file_text": "x"} if command == "create" else {})
    text, is_error = run(tool, command, **arguments)
    assert is_error
    assert "secret" not in text or "secret" in str(path)
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize("link", ["file", "folder"])
def test_symbolic_links_are_refused(tool, tmp_path, link):
    tool.folder.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (tool.folder / "link").symlink_to(outside / "secret" if link == "file" else outside)
    path = "/memories/link" if link == "file" else "/memories/link/secret"
    for command, more in (
        ("view", {}),
        ("str_replace", {"old_str": "secret", "new_str": "x"}),
        ("insert", {"insert_line": 0, "insert_text": "x"}),
        ("create", {"file_text": "x"}),
        ("delete", {}),
    ):
        text, is_error = run(tool, command, path=path, **more)
        assert is_error
        assert "symbolic link" in text
    assert (outside / "secret").read_text() == "secret"
    assert "link" not in good(tool, "view", path="/memories")


def test_deleting_a_folder_never_follows_links_inside_it(tool, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("keep")
    good(tool, "create", path="/memories/d/f", file_text="x")
    (tool.folder / "d" / "link").symlink_to(outside)
    good(tool, "delete", path="/memories/d")
    assert (outside / "keep").read_text() == "keep"


def test_special_files_are_refused(tool):
    tool.folder.mkdir()
    os.mkfifo(tool.folder / "pipe")
    text, is_error = run(tool, "view", path="/memories/pipe")
    assert is_error
    assert "no plain file" in text


def test_size_bombs_are_refused(tmp_path):
    tool = MemoryTool(tmp_path / "m", max_file_bytes=100, max_total_bytes=250, max_files=4)
    assert run(tool, "create", path="/memories/big", file_text="é" * 51)[1]
    good(tool, "create", path="/memories/a", file_text="x" * 100)
    good(tool, "create", path="/memories/b", file_text="x" * 100)
    text, is_error = run(tool, "create", path="/memories/c", file_text="x" * 60)
    assert is_error
    assert "full" in text
    good(tool, "create", path="/memories/c", file_text="x" * 50)
    assert run(tool, "insert", path="/memories/a", insert_line=0, insert_text="y")[1]
    good(tool, "str_replace", path="/memories/a", old_str="x" * 100, new_str="x")
    good(tool, "create", path="/memories/d", file_text="")
    assert "files at most" in run(tool, "create", path="/memories/e", file_text="")[0]
    (tool.folder / "planted").write_bytes(b"x" * 1_000_000)
    assert "larger than" in run(tool, "view", path="/memories/planted")[0]


def test_a_crash_while_writing_keeps_the_old_text(tool, monkeypatch):
    good(tool, "create", path="/memories/a", file_text="old")

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", broken)
    text, is_error = run(tool, "str_replace", path="/memories/a", old_str="old", new_str="new")
    assert is_error
    assert "No space left" in text
    assert [p.name for p in tool.folder.iterdir()] == ["a"]
    assert (tool.folder / "a").read_text() == "old"
