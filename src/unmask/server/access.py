"""The middleware before every route: allowed hosts, origins and keys, and limits on the body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import secrets
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unmask.server.errors import HTTPError, internal, parse_json
from unmask.server.jobs import Jobs
from unmask.server.limits import MAX_BODY
from unmask.server.sign_in import SIGN_IN, SIGN_IN_HEADERS, is_opened, is_page

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN = "/health"  # the only route without a key
COOKIE = "unmask-page"
PARSED = "unmask.parsed"  # key in a scope for its parsed body
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may call the server.

    hosts: allowed names in a Host header, besides this machine's own. any_address: also allow every plain IP address,
    which an attacker's name cannot resolve to. origins: other sites whose pages may call. Browsers send no key when
    they load the parts of a page. So whoever opens the page with the key gets a cookie, a random word of this process,
    that gives access to the page's own files (`is_page`) and nothing else.
    """

    key: str | None = None
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    any_address: bool = False
    cookie: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    def check(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Raise HTTPError, or return the foreign origin that may read the answer."""
        fields: dict[str, list[str]] = {}
        for name, value in headers:
            fields.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip())
        host = fields.get("host", [])
        if len(host) != 1 or not self._knows(host[0]):
            raise HTTPError(421, "this server does not go by that name: see --allow-host", "unknown_host")
        origin = fields.get("origin", [])
        foreign = None
        if origin and not (len(origin) == 1 and _same(origin[0], host[0])):
            if len(origin) > 1 or origin[0].lower() not in self.origins:
                raise HTTPError(403, "pages of other sites may not call this server: see --allow-origin", "origin")
            foreign = origin[0]
        preflight = method == "OPTIONS" and foreign is not None  # carries no key and reveals nothing
        reads = method in ("GET", "HEAD")  # all other methods may have a body, which is read after this check
        if (path == OPEN and reads) or preflight or self._has_key(fields.get("authorization", [])):
            return foreign
        if not (is_page(path) and reads and self._has_cookie(fields.get("cookie", []))):
            # Browsers show no dialog for this scheme, so whoever opens a page gets ours, see sign_in.py.
            ask = {"www-authenticate": 'Bearer realm="unmask"'}
            raise HTTPError(401, "an API key is needed: send it as Authorization: Bearer KEY", "no_key", ask)
        return foreign

    def _knows(self, host: str) -> bool:
        name = _name(host)
        if name is None:
            return False
        if name in LOOPBACK or name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address

    def _has_key(self, headers: list[str]) -> bool:
        if self.key is None:
            return True
        offered = _offered(headers[0]) if len(headers) == 1 else ""
        return _equal(offered, self.key)

    def _has_cookie(self, headers: list[str]) -> bool:
        pairs = [pair.strip().partition("=") for line in headers for pair in line.split(";")]
        return any(name == COOKIE and _equal(value, self.cookie) for name, _, value in pairs)


def _offered(header: str) -> str:
    kind, _, value = header.partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


def _equal(offered: str, wanted: str) -> bool:
    # Hashed to equal length, so that the time of the comparison reveals nothing.
    return hmac.compare_digest(_digest(offered), _digest(wanted))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).digest()


def _name(host: str) -> str | None:
    """The host name in a Host header, without its port; None if the header is malformed.

    >>> _name("LocalHost:8000"), _name("[::1]:80"), _name("a@b")
    ('localhost', '::1', None)
    """
    if not host or any(c in host for c in "@/\\?#, \t"):
        return None
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        port = port.removeprefix(":") if port.startswith(":") else ("bad" if port else "")
        if not bracket or ":" not in name:
            return None
    else:
        name, colon, port = host.partition(":")
        if colon and not port:
            return None
    if port and not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        return None
    return name.lower() or None


def _same(origin: str, host: str) -> bool:
    """Whether a page of this origin came from the server itself."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return False
    default = 80 if parts.scheme == "http" else 443
    _, _, mine = host.rpartition("]")[2].partition(":")
    return parts.hostname == _name(host) and (port or default) == int(mine or default)


class AccessMiddleware:
    """Checks headers and key, then reads the whole body within its limits and parses it, then calls the app."""

    def __init__(self, app: ASGIApp, *, jobs: Jobs, access: Access) -> None:
        self.app, self.jobs, self.access = app, jobs, access
        self.limits, self.metrics = jobs.limits, jobs.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status, begun = 500, False
        foreign: str | None = None
        if bare := scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # answered like GET, without the body

        async def answer(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                present = {name.lower() for name, _ in message["headers"]}
                extra = HEADERS | (_cors(foreign) if foreign else {})
                if self.access.key is not None and status == 200 and is_page(scope["path"]):
                    extra["set-cookie"] = f"{COOKIE}={self.access.cookie}; Path=/; HttpOnly; SameSite=Strict"
                message["headers"] = [
                    *message["headers"],
                    *((n.encode(), v.encode("latin-1")) for n, v in extra.items() if n.encode() not in present),
                ]
            elif bare:
                message = {**message, "body": b""}
            await send(message)

        try:
            _check_framing(scope)
            foreign = self.access.check(scope["method"], scope["path"], scope["headers"])
            if foreign and scope["method"] == "OPTIONS":
                await _send_json(answer, 204, None, {})
                return
            if scope["method"] == "POST":
                self.jobs.check_room()  # checked again after the body; here a full server refuses at little cost
                receive = await self._body(scope, receive)
            await self.app(scope, receive, answer)
        except HTTPError as e:
            if e.status == 401 and is_opened(scope):
                await _send(answer, 401, SIGN_IN, e.headers | SIGN_IN_HEADERS)
            else:
                await _send_json(answer, e.status, e.body, e.headers)
        except Exception:
            if begun:
                raise
            traceback.print_exc()
            await _send_json(answer, 500, internal().body, {})
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.answered(route, status, time.perf_counter() - began)

    async def _body(self, scope: Scope, receive: Receive) -> Receive:
        """Read and parse the whole body into `scope`; returns a `receive` that yields it again."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise HTTPError(415, "send JSON, with the header content-type: application/json", "not_json")
        too_large = HTTPError(413, f"a body may have {MAX_BODY} bytes", "too_large", {"connection": "close"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > MAX_BODY:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HTTPError(400, "the body ended early", "invalid_json")
                    body += message.get("body", b"")
                    if len(body) > MAX_BODY:
                        raise too_large
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise HTTPError(408, "the body took too long to arrive", "timeout", {"connection": "close"}) from None
        whole = bytes(body)
        scope[PARSED] = parse_json(whole)
        replayed = False

        async def again() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()  # from now on, this reports the client's disconnection
            replayed = True
            return {"type": "http.request", "body": whole, "more_body": False}

        return again


def _check_framing(scope: Scope) -> None:
    """Refuse a body with two conflicting lengths.

    A proxy might use one and we the other, and the bytes in between would be a request of their own (request
    smuggling). HTTP/1.0 has no transfer-encoding: there the other end is the connection's.
    """
    names = {name.lower() for name, _ in scope["headers"]}
    if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
        message = "content-length and transfer-encoding exclude each other: send one of them"
        raise HTTPError(400, message, "two_lengths", {"connection": "close"})


def _cors(origin: str) -> dict[str, str]:
    return {
        "access-control-allow-origin": origin,
        "access-control-allow-headers": "authorization, content-type",
        "access-control-allow-methods": "GET, POST",
        "cross-origin-resource-policy": "cross-origin",
        "vary": "origin",
    }


async def _send_json(send: Send, status: int, body: Any, headers: dict[str, str]) -> None:
    await _send(send, status, b"" if body is None else json.dumps(body).encode(), headers)


async def _send(send: Send, status: int, data: bytes, headers: dict[str, str]) -> None:
    fields = {"content-type": "application/json", "content-length": str(len(data))} | headers
    raw = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": data})
