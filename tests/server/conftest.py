"""What the server's tests share: a small model, the app around it, and the same as a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from small_server import Running, random_model, running
from starlette.testclient import TestClient

from unmask.model import Model
from unmask.server.app import make_app
from unmask.server.limits import Limits


@pytest.fixture(scope="session")
def small() -> Model:
    return random_model()


@pytest.fixture(scope="session")
def server(small: Model) -> Iterator[Running]:
    """One server for the tests that only ask."""
    with running(small) as found:
        yield found


@pytest.fixture(scope="session")
def client(small: Model) -> Iterator[TestClient]:
    """The app without a socket between."""
    limits = Limits(budget=1 << 14, length=128, requests=16)
    with TestClient(make_app(small, name="small", limits=limits), base_url="http://localhost") as found:
        yield found
