"""The words of the login-bug example; `kvevict.agent.examples` puts the session together."""

SYSTEM = """You are a coding agent in the repository of a web shop (TypeScript, Express, Jest).
Tools: read_file (a file or a folder), bash (a shell command). An edit is a unified diff in your
message; the client applies it when the message ends and reports only failures.
Rules: never change the public API without asking; run the tests of what you touched; say what you
changed and why. Answer in the user's language.

How to work:
1. Find the cause before you change anything. Say what you read and what it told you; a guess is
called a guess. When two explanations fit, name the check that tells them apart and run it.
2. Change as little as solves the problem. Do not reformat, rename or move what you do not have to.
Do not add a dependency; if one seems needed, ask first and say what it would save.
3. Tests come with the change. A bug gets a test that fails before the fix and passes after it. Do
not delete or weaken a test to make a run green; if a test is wrong, say why and ask.
4. Secrets never appear in your messages, in code or in logs: no keys, no tokens, no passwords. If
you meet one, say where it is without repeating it.
5. Other failures that you notice are reported at the end in one list, not fixed on the way.

The repository: src/routes holds the HTTP handlers, src/auth everything about tokens and sessions,
src/config reads the environment once at the start, tests mirrors src. The database is Postgres
through a thin layer in src/db; tests use an in-memory copy and need no network. Node 22, npm 10,
Jest 30. The main branch is deployed every morning at six; a hot fix needs a green suite and the
name of a person in the commit message. The mobile apps call the same API as the web shop: field
names and status codes of /api/* are a contract, changes to them need a version.

Style of answers: short sentences, no headings for less than a page, file names with their path,
commands in full. Numbers with their unit. At the end of a task: what was wrong, what was changed,
how it was tested, what is left."""

BUG = """Since this morning's deploy every login answers 401 Unauthorized, although the passwords
are right. Please find out why and fix it. Please do not touch the password hashing: it was
audited
last month. The failing endpoint is POST /api/session."""

FOLLOW_UP = """Good find. Yes, fix the clock handling there, but keep accepting tokens of the old
issuer until the end of the month: the mobile app 4.2 still sends them. And add a test for the
skew
before you run the whole suite."""

# Assistant messages by their number in the session.
NOTES = {
    3: """I will start with the session route, since that is where the 401 is produced, and then
follow the request to the place that refuses it.""",
    6: """The route itself only turns an AuthError into 401. The error comes from verifyToken in
the middleware, so the password check has already succeeded at that point. Next: the
middleware and the configuration that it reads. Two things in this file are worth
remembering. First, the handler swallows the reason: it logs `reason` but answers the
bare word Unauthorized, so the client cannot tell an expired token from one of the wrong
issuer; that is right for an attacker's eyes and bad for ours, and I do not change it.
Second, the handler passes ACCEPTED_ISSUERS on each call, so the list is read once at
the start and a change of the environment needs a restart.""",
    9: """I found the cause. verifyToken compares `iat` and `nbf` with Date.now() in milliseconds,
while the new issuer signs seconds, and since today's deploy CLOCK_TOLERANCE is read as
a string, so `now + tolerance` concatenates. Every fresh token therefore looks as if it
came from the future and is refused. Passwords are fine. I propose to (1) convert all
times to seconds in one place, (2) parse the tolerance as a number, (3) leave hashing
alone. Shall I?

What speaks for this and against other causes: the audit log has an entry "credentials
valid" for each refused login, so the hash comparison passed; the refusals began with
the deploy, which changed only the issuer and the configuration; and a token that is a
day old is still accepted, since its times lie far enough in the past for the wrong
comparison to come out right. A wrong key would refuse old tokens too, and a wrong
cookie flag would not reach verifyToken at all.""",
    11: """Understood: seconds everywhere, the old issuer stays accepted until the end of the
month, and a test for the skew comes before the whole suite. First I look at how the
present tests fail, so that I can tell old failures from new ones. I also write down
what must not change: the hashing in src/auth/password, the status codes, the cookie's
name and its flags.""",
    14: """Of the failures, 9 are this bug (session, refresh, logout). Two in the checkout suite
fail for another reason: they expect a tax rate of 19 % and get 16 %. I leave those
alone and will mention them at the end. In short, what fails before any change of mine:
session 3, refresh 3, logout 3 (all of them 401 instead of 200, all on fresh tokens),
checkout 2 (tax). Everything else passes, 181 tests in all. So after the fix exactly the
two checkout failures should be left, and nothing new.""",
    15: """First the configuration: the tolerance becomes a number, with a clear error if it is
none.

--- a/src/config/auth.ts
+++ b/src/config/auth.ts
@@
-export const CLOCK_TOLERANCE = process.env.CLOCK_TOLERANCE ?? 30;
+export const CLOCK_TOLERANCE = seconds('CLOCK_TOLERANCE', 30);
""",
    16: """Now the middleware: one function for the present time in seconds, used by every check.

--- a/src/auth/middleware.ts
+++ b/src/auth/middleware.ts
@@
-  const now = Date.now();
+  const now = nowInSeconds();
@@
-  if (claims.nbf > now + CLOCK_TOLERANCE) throw new AuthError('token from the future');
+  if (claims.nbf - CLOCK_TOLERANCE > now) throw new AuthError('token from the future');

The comparison is also turned round, so that the tolerance is taken from the token's
side and never added to the clock: with a string on the right the old form could not
fail, it could only lie.""",
    17: """The old issuer stays in ACCEPTED_ISSUERS, with a comment that says until when and why:

--- a/src/auth/issuers.ts
+++ b/src/auth/issuers.ts
@@
-export const ACCEPTED_ISSUERS = ['shop-v2'];
+// shop-v1 signs for the mobile app 4.2; remove it after the end of the month.
+export const ACCEPTED_ISSUERS = ['shop-v2', 'shop-v1'];
""",
    18: """And the test that was asked for: a token 20 seconds ahead is accepted, one 40 seconds
ahead is refused, and a token of shop-v1 is accepted.

--- /dev/null
+++ b/tests/auth/skew.test.ts
@@
+test.each([[20, 200], [40, 401]])('skew of %d s gives %d', async (ahead, status) => {
+  expect((await login({ nbf: nowInSeconds() + ahead })).status).toBe(status);
+});
""",
    19: """I run the auth suite alone first; it is quick, and a mistake of mine shows at once.
While it runs: the two diffs do not touch the cookie, the session table or the audit
entry. Sessions that were opened before the fix stay valid, since their stored expiry is
in seconds already; nobody is logged out by the deploy. The tolerance is 30 seconds as
before, only now it is a number, and a value that is none stops the server at the start
with its name and its text instead of refusing every login hours later.""",
    22: """The auth suite passes but for one test: refresh still compares milliseconds, because
src/auth/refresh.ts has a copy of the check instead of calling the middleware's. The
same mistake in two places is how this bug got past the review, so I will not fix the
copy but remove it. I also checked that no third copy exists: a search for Date.now()
under src/auth finds only the two lines that convert to seconds and the audit timestamp,
which is meant to be in milliseconds.""",
    23: """I let refresh.ts use the same function, so that there is one place left that knows the
clock.

--- a/src/auth/refresh.ts
+++ b/src/auth/refresh.ts
@@
-  if (claims.exp * 1000 < Date.now()) throw new AuthError('expired');
+  if (isExpired(claims)) throw new AuthError('expired');
""",
    24: """Decision for the record: times are seconds since the epoch everywhere inside src/auth;
milliseconds exist only at the border to Date. Now the whole suite, as agreed. What I
expect: 183 tests (181 and the two new ones), of which two in the checkout suite fail as
before because of the tax rate. If anything else fails, I stop and look at it before I
report. Afterwards I sum up for the commit message: cause (milliseconds against seconds,
tolerance as a string), change (one clock function, tolerance parsed, old issuer
accepted until the end of the month), proof (skew test, auth suite, whole suite), left
for others (tax rate in checkout, removal of shop-v1 after the end of the month).""",
}
