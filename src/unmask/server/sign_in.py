"""Signing in: whoever opens the page without the key gets a 401 answer that is itself a page and asks for it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.types import Scope

SIGN_IN = (Path(__file__).parent / "page" / "sign_in.html").read_bytes()


def _hashed(tag: str) -> str:
    """The hash of the content of such tags, for a policy under which nothing else may run."""
    inside = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), SIGN_IN, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part).digest()).decode()}'" for part in inside)


# The only page with inline script and style, because it cannot load anything.
SIGN_IN_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": (
        f"default-src 'none'; script-src {_hashed('script')}; style-src {_hashed('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


def is_page(path: str) -> bool:
    """Whether this is a part of the page, which is identical for everyone and reveals nothing about the model.

    >>> is_page("/"), is_page("/page/main.js"), is_page("/info")
    (True, True, False)
    """
    return path in ("/", "/docs", "/openapi.json") or path.startswith("/page/")


def is_opened(scope: Scope) -> bool:
    """Whether a person opens a page, rather than a program or a page making a call."""
    accepted = b",".join(value for name, value in scope["headers"] if name.lower() == b"accept")
    return scope["method"] == "GET" and is_page(scope["path"]) and b"text/html" in accepted.lower()
