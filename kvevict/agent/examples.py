"""Examples that ship with the package: a login bug, and random histories for tests.

`login_bug` is a coding session of 26 messages and about 15.4 thousand tokens (3.0 characters a
token): the system prompt, two user messages (2 and 10), and five tool results (5, 8, 13, 21, 26)
that hold 81 % of it. The project wrote it; no recorded session is in it.
"""

from __future__ import annotations

import json
import random
from typing import Any

from kvevict.agent.formats import from_normal, to_normal
from kvevict.agent.login_text import BUG, FOLLOW_UP, NOTES, SYSTEM

_CALLS = {
    4: ("read_file", {"path": "src/routes/session.ts"}),
    7: ("read_file", {"path": "src/auth"}),
    12: ("bash", {"command": "npx jest --ci --verbose 2>&1"}),
    20: ("bash", {"command": "npx jest tests/auth --ci --verbose 2>&1"}),
    25: ("bash", {"command": "npx jest --ci --verbose --coverage 2>&1"}),
}
# Characters of each result: together 81 % of the session.
_LENGTHS = {5: 6_600, 8: 9_000, 13: 8_400, 21: 5_700, 26: 7_760}
_AREAS = ("session", "refresh", "logout", "password", "profile", "basket", "checkout", "orders")
_CASES = (
    "accepts valid credentials",
    "refuses a wrong password",
    "refuses an expired token",
    "refuses an unknown issuer",
    "sets the cookie flags",
    "writes an audit entry",
    "limits the rate per address",
    "answers in the language of the request",
)


def login_bug(format: str = "openai-chat") -> Any:
    """Return the login-bug session in a format; the 26 messages are those of "openai-chat"."""
    messages: list[dict[str, Any]] = []
    for number in range(1, 27):
        if number == 1:
            messages.append({"role": "system", "content": SYSTEM})
        elif number in (2, 10):
            messages.append({"role": "user", "content": BUG if number == 2 else FOLLOW_UP})
        elif number in NOTES:
            messages.append({"role": "assistant", "content": NOTES[number]})
        elif number in _CALLS:
            tool, arguments = _CALLS[number]
            function = {"name": tool, "arguments": json.dumps(arguments)}
            call = {"id": f"call_{number:02d}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            call_id = f"call_{number - 1:02d}"
            content = _result(number)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if format == "openai-chat":
        return messages
    return from_normal(to_normal(messages, "openai-chat"), format)


def _result(number: int) -> str:
    """Return the output of the call before message `number`, cut to its length."""
    lines = _source(number) if number in (5, 8) else _tests(number)
    text = ""
    for line in lines:
        if len(text) + len(line) + 1 > _LENGTHS[number]:
            break
        text += line + "\n"
    return text


def _source(number: int) -> list[str]:
    """Return TypeScript that reads like the module that was asked for."""
    lines: list[str] = []
    for area in _AREAS * 2:
        name = area.capitalize()
        lines += [
            f"// src/{'routes' if number == 5 else 'auth'}/{area}.ts",
            f"import {{ verifyToken, AuthError }} from '../auth/{area}';",
            f"export interface {name}Claims {{ iss: string; sub: string; iat: number }}",
            f"export async function {area}Handler(request: Request, response: Response) {{",
            "  const token = request.cookies['sid'] ?? bearer(request.headers.authorization);",
            f"  if (!token) return response.status(401).json({{ error: '{area}: no token' }});",
            "  try {",
            f"    const claims = await verifyToken<{name}Claims>(token, ACCEPTED_ISSUERS);",
            "    const now = Date.now();  // milliseconds",
            "    if (claims.iat > now + CLOCK_TOLERANCE) throw new AuthError('from the future');",
            f"    const row = await db.{area}.findFirst({{ where: {{ user: claims.sub }} }});",
            f"    return response.status(200).json(await present{name}(row, claims));",
            "  } catch (error) {",
            "    if (!(error instanceof AuthError)) throw error;",
            f"    log.warn({{ area: '{area}', reason: error.message }}, 'refused');",
            "    return response.status(401).json({ error: 'Unauthorized' });",
            "  }",
            "}",
            "",
        ]
    return lines


def _tests(number: int) -> list[str]:
    """Return the output of a test run."""
    lines = [f"> jest --ci --verbose  (run {number})", ""]
    for area in _AREAS * 3:
        broken = number == 13 and area in ("session", "refresh", "logout")
        broken = broken or (number == 21 and area == "refresh")
        lines.append(f"{'FAIL' if broken else 'PASS'} tests/{area}/{area}.test.ts")
        for n, case in enumerate(_CASES):
            mark = "✕" if broken and n in (0, 2, 4) else "✓"
            lines.append(f"  {mark} {area} {case} ({7 * n + len(area)} ms)")
            if mark == "✕":
                lines += [
                    f"    expect(received).toBe(expected)  // POST /api/{area}",
                    "    Expected: 200",
                    "    Received: 401",
                    f"      at Object.<anonymous> (tests/{area}/{area}.test.ts:{31 + 12 * n}:47)",
                ]
    return lines


def random_history(seed: int, format: str = "openai-chat", messages: int = 30) -> Any:
    """Return a random sound session in a format, the same for the same seed.

    It has user turns, parallel calls, errors, images, thinking and long results.

    Args:
        seed: any integer.
        format: a format's name.
        messages: messages of the Anthropic form, about; the session may be cut at any turn.
    """
    rng = random.Random(seed)
    built: list[dict[str, Any]] = [{"role": "user", "content": _words(rng, 30)}]
    calls = 0
    while len(built) < messages:
        blocks: list[dict[str, Any]] = []
        if rng.random() < 0.3:
            blocks.append({"type": "thinking", "thinking": _words(rng, 40), "signature": "c2ln"})
        if rng.random() < 0.6:
            blocks.append({"type": "text", "text": _words(rng, 40)})
        results: list[dict[str, Any]] = []
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            calls += 1
            tool = rng.choice(("read", "bash", "grep", "edit", "write", "skill", "todo"))
            value = {"path": _words(rng, 2), "text": _words(rng, rng.choice((1, 1, 60)))}
            name = f"call_{calls}"
            blocks.append({"type": "tool_use", "id": name, "name": tool, "input": value})
            text = _words(rng, rng.choice((1, 5, 60, 400)))
            content: Any = text if rng.random() < 0.7 else [{"type": "text", "text": text}]
            if rng.random() < 0.05:
                source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
                content = [{"type": "image", "source": source}]
            results.append({"type": "tool_result", "tool_use_id": name, "content": content})
            if rng.random() < 0.1:
                results[-1]["is_error"] = True
        if not results and not any(b["type"] == "text" for b in blocks):
            blocks.append({"type": "text", "text": _words(rng, 10)})
        built.append({"role": "assistant", "content": blocks})
        if results:
            if rng.random() < 0.1:
                results.append({"type": "text", "text": _words(rng, 8)})
            built.append({"role": "user", "content": results})
        else:
            built.append({"role": "user", "content": _words(rng, rng.choice((3, 12, 60)))})
    if format == "anthropic":
        return built
    return from_normal(to_normal(built, "anthropic"), format)


def _words(rng: random.Random, most: int) -> str:
    count = rng.randint(1, most)
    return " ".join(
        rng.choices(("the", "cache", "déjà", "слот", "読む", "path/to.py", "42"), k=count)
    )
