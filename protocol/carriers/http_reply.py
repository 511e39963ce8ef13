"""Over HTTP, the client's side: what a reply says about a failure.

**What is looked at.** The header ``x-failsoft-code`` at any status. The body only where it speaks of a
failure: at a status of 400 or more, or under the content type of a problem. The body of any other reply
is what a model wrote, and nothing in it is a failure of ours, a whole problem document included.

**What comes first.** The header, then the problem document, then a token in the body's text. Proxies
replace bodies, and no server puts generated text into a header of ours.

**What is believed.**

- A token, in the header or in text, as far as its MAC goes: signed or checksummed. Where it stands adds
  nothing, for anyone can compute the checksum.
- A document is what the server that we dialled says of itself, in the place that HTTP has for it:
  structured, as the status beside it is. But a server that relays what a model's code answers (a tool, a
  sandbox) relays its documents too. So a reader that holds a key (its own, or the process's) believes a
  document as signed when its token is signed, and as checksummed otherwise.
- A document's ``data`` may lower that (``code_trust``: what the server itself read in mere text), and
  never raise it.
- Only the top level of a document is structured. Other programs' JSON (the error objects of vLLM and
  SGLang, FastAPI's ``detail``) is text, whatever its ``code`` is; and what it repeats of the request
  (`ECHOED`) is not looked at, for a model's earlier output may stand in a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from protocol.codes import Code
from protocol.errors import CARRIED, CODE_TRUST, CodedError, trust_of
from protocol.foreign import excerpt
from protocol.keys import Key, held
from protocol.reading import FOREIGN, Reading, read, trust_facts
from protocol.safe import MAX_DETAIL, clean, json_safe
from protocol.token import Token, Trust, defuse, is_id, scan

HEADER: Final = "x-failsoft-code"
"""The HTTP header that carries a token."""
PROBLEM: Final = "application/problem+json"
"""Media type of a problem body (RFC 9457)."""
URN: Final = "urn:failsoft:code:"
"""What a problem's ``type`` begins with; the code follows."""
ECHOED: Final = frozenset({"body", "choices", "ctx", "input", "messages", "prompt"})
"""Members of an error's JSON that repeat the request (pydantic's ``input``) or hold generated text."""

Headers = Mapping[Any, Any] | Iterable[tuple[Any, Any]]

_MAX_HEADERS: Final = 256
_MAX_JSON: Final = 1 << 20
_MAX_DEPTH: Final = 16
_ECHOED_IN_TEXT = re.compile(rb'"(?:%s)"\s*:' % b"|".join(name.encode() for name in sorted(ECHOED)))
_SECONDS = re.compile(r"[0-9]{1,9}\Z")


def read_reply(
    status: int | None, headers: Headers, body: bytes, *, text: bool = True, key: Key = None
) -> Reading:
    """What a reply says about a failure, as the module's docstring has it; `Reading()` for nothing.

    ``headers`` is a mapping or a list of pairs (text or bytes), in any case, duplicates included;
    ``body`` is decoded from its Content-Encoding. With ``text=False`` only header and document count, and
    no text of the body: a 400 quotes the prompt that it refuses. ``key`` verifies tokens, else the
    process's keys do. Pure; never raises on what a server sent."""
    header = _in_header(headers, key)
    if not body or not reads_body(status, headers):
        return header or Reading()
    document = _in_document(body, key) if _media(headers) == PROBLEM else None
    if document is None:
        return header or (_in_text(body, key) if text else Reading())
    if header is None:
        return document
    if (header.code, header.id) != (document.code, document.id):
        return header
    trust = min(max(header.trust, document.trust), trust_of(document.data))
    return Reading(header.code, header.id, document.detail, document.data, trust, header.raw)


def reads_body(status: int | None, headers: Headers) -> bool:
    """Whether `read_reply` looks at the body of such a reply."""
    return (status is not None and status >= 400) or _media(headers) == PROBLEM


def read_response(response: object, headers: Headers, *, key: Key = None) -> Reading:
    """`read_reply` for a response object of httpx, requests or aiohttp, with what it holds of the body:
    nothing is read from the network. (`protocol.carriers.http_stream` reads, within a budget.)"""
    return read_reply(status_in(response), headers, body_in(response), key=key)


def read_exception(exc: BaseException, *, key: Key = None) -> Reading:
    """`read_reply`, without the body's text, for what an HTTP client raises for a status: the response
    that httpx's and requests' exceptions hold, the status and headers of aiohttp's. `Reading()` for any
    other exception, whatever attributes it has."""
    try:
        own = vars(exc)
        source = own.get("response", exc if "request_info" in own else None)
        headers = getattr(source, "headers", None)
        if not isinstance(headers, Mapping):
            return Reading()
        return read_reply(status_in(source), headers, body_in(source), text=False, key=key)
    except Exception:  # noqa: BLE001 - a foreign exception's attributes may raise anything
        return Reading()


def error_from_reply(
    status: int,
    headers: Headers,
    body: bytes,
    *,
    code: Code | str = "UPSTREAM.SERVER_ERROR",
    text: bool = True,
    key: Key = None,
) -> CodedError:
    """The CodedError to raise for a reply, under the name that it carries (`read_reply`, with ``text`` and
    ``key`` as there), else under ``code`` (that of `faults.classify_status`, say). Its data has the status;
    what the server wrote is defused."""
    found = read_reply(status, headers, body, text=text, key=key)
    data = {name: value for name, value in found.data.items() if name not in (CODE_TRUST, CARRIED)}
    data["status"] = status
    after = _seconds(headers)
    if after is not None:
        data["retry_after"] = after
    # As JSON, where a token is as readable as in text, and the colon that breaks it as harmless.
    data = msgspec.json.decode(defuse(msgspec.json.encode(json_safe(data)).decode()))
    data |= trust_facts(found)
    detail = defuse(found.detail) or excerpt(body, MAX_DETAIL)
    return CodedError(found.code or code, detail, data, id=found.id or None)


def facts_of(exc: BaseException) -> dict[str, Any]:
    """What an HTTP client's exception knows of the reply, for a failure's data: ``status``, the seconds
    of Retry-After as ``retry_after``, and the start of the ``body``. (httpx and requests keep the response,
    aiohttp status and headers alone; none of these exceptions gets through Ray whole.)"""
    facts: dict[str, Any] = {}
    try:
        own = vars(exc)
        response = own.get("response")
        if response is None and "request_info" not in own:
            return facts
        source = exc if response is None else response
        status = status_in(source)
        if status is None or not 100 <= status <= 599:
            return facts
        facts["status"] = status
        body = body_in(source)
        headers = getattr(source, "headers", None)
        after = _seconds(headers) if isinstance(headers, Mapping) else None
        if after is not None:
            facts["retry_after"] = after
        if body:
            facts["body"] = excerpt(body)
    except Exception:  # noqa: BLE001 - a foreign exception's attributes may raise anything; what was found is kept
        return facts
    return facts


def status_in(response: object) -> int | None:
    """The status of a response object: httpx's and requests' ``status_code``, aiohttp's ``status``."""
    for name in ("status_code", "status"):
        status = getattr(response, name, None)
        if isinstance(status, int):
            return int(status)
    return None


def body_in(response: object) -> bytes:
    """The body that a response object holds already; empty when it was not read."""
    try:
        if getattr(response, "_content", None) is False:
            return b""  # requests, not read yet: asking for ``content`` reads it all, whatever its size
        for name in ("content", "_body"):  # httpx and requests; aiohttp, whose ``content`` is a stream
            body = getattr(response, name, None)
            if isinstance(body, bytes):
                return body
    except Exception:  # noqa: BLE001 - httpx raises ResponseNotRead on an unread stream, a stranger anything
        return b""
    return b""


def values(headers: Headers, name: str) -> Iterator[str]:
    """The values of the header ``name`` (lower case), in order."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    for n, (held_name, value) in enumerate(pairs):
        if n >= _MAX_HEADERS:
            return
        if _text(held_name).lower() == name:
            yield _text(value)


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _first(headers: Headers, name: str) -> str:
    return next(values(headers, name), "")


def _seconds(headers: Headers) -> int | None:
    after = _first(headers, "retry-after").strip()
    return int(after) if _SECONDS.match(after) else None


def _media(headers: Headers) -> str:
    return _first(headers, "content-type").partition(";")[0].strip().lower()


def _in_header(headers: Headers, key: Key) -> Reading | None:
    """The most believed of the header's tokens, the first of equals. A part that is more than a token
    is not one of ours."""
    best: Token | None = None
    for value in values(headers, HEADER):
        for part in value.split(",")[:8]:
            token = _whole(part.strip(), key)
            if token is not None and (best is None or token.trust > best.trust):
                best = token
    if best is None:
        return None
    return Reading(best.code or FOREIGN, best.id, "", {}, best.trust, best.raw)


def _whole(text: object, key: Key) -> Token | None:
    """The token that ``text`` is, with nothing around it."""
    if not isinstance(text, str) or len(text) > 128:
        return None
    tokens = scan(text, key=key)
    return tokens[0] if tokens and len(tokens[0].raw) == len(text) else None


def _in_document(body: bytes, key: Key) -> Reading | None:
    document = _json(body)
    if not isinstance(document, dict):
        return None
    code, kind = document.get("code"), document.get("type")
    if not isinstance(code, str):  # a gateway may keep the standard's own members alone
        code = kind.removeprefix(URN) if isinstance(kind, str) and kind.startswith(URN) else ""
    try:
        named = Code(code)
    except ValueError:
        return None  # some other program's problem: its texts may still hold a token
    id = str(document.get("instance") or "")
    id = id if is_id(id) else ""
    data = json_safe(document["data"]) if isinstance(document.get("data"), dict) else {}
    token = _whole(document.get("token"), key)
    if token is not None and (token.code, token.id) != (named, id):
        token = None
    trust = Trust.STRUCTURED
    if held() if key is None else key:
        trust = token.trust if token is not None else Trust.CHECKSUMMED
    detail = document.get("detail")
    return Reading(
        named,
        id,
        clean(detail) if isinstance(detail, str) else "",
        data,
        min(trust, trust_of(data)),
        token.raw if token is not None else "",
    )


def _in_text(body: bytes, key: Key) -> Reading:
    parsed = _json(body)
    return read(_before_echoes(body) if parsed is None else "\n".join(_texts(parsed)), key=key)


def _before_echoes(body: bytes) -> bytes:
    """Of JSON that is cut, or too long to be parsed, what stands before the first of `ECHOED`: where its
    value ends cannot be told. Of any other text, all of it."""
    found = _ECHOED_IN_TEXT.search(body) if body.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") else None
    return body if found is None else body[: found.start()]


def _json(body: bytes) -> Any:
    """``body`` as JSON; None when it is none. Its text is decoded first: whatever charset a server names,
    a code is ASCII, and a letter that is not must not cost the failure its name."""
    if len(body) > _MAX_JSON:
        return None
    try:
        return msgspec.json.decode(body.decode("utf-8", "replace").lstrip("\ufeff"))
    except (msgspec.DecodeError, RecursionError):
        return None


def _texts(value: object, depth: int = _MAX_DEPTH) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth > 0 and isinstance(value, list):
        for one in value:
            yield from _texts(one, depth - 1)
    elif depth > 0 and isinstance(value, dict):
        for name, one in value.items():
            if name not in ECHOED:
                yield from _texts(one, depth - 1)
