"""The embedded engine: a small, real, SGLang-compatible text server for tests, examples and chaos runs.

It exists so that everything above it (supervisor, router, rollout client, weight updates, injectors) can be
tried against a separate process with real sockets, real queues and real signals, on a laptop and in CI, in
well under a second. It is a program and not a mock: an n-gram model is trained at start on `corpus.txt`, a
scheduler with a bounded running set paces tokens, and requests can be aborted, paused and outlived.

Start it with `python -m dispatch.engines.embedded --port P`; `--port 0` picks a free port and the line
`listening on HOST:PORT` on stdout says which. Exit statuses: 0 after SIGTERM or SIGINT, 1 when the engine
broke or can't bind, 2 for a bad flag or an unreadable `--model-path`, 98 when the address is in use. A signal
in the first tenths of a second, before Python has loaded the program, ends it as any process, by that signal.

Modules: `settings` (flags), `ngram` (tokenizer and model), `generation` (one request), `scheduler` (who runs
when), `dialects` (the two JSON shapes), `replies` (a generation served over HTTP), `engine` (the state),
`server` and `control` (the endpoints), `witness` (what tests may count), `misbehave` (faults, behind
`--faults`), `litter` (what a killed engine leaves about, behind `--litter`).

It imports only aiohttp, msgspec and the standard library, so that a start costs no more than it must.
"""
