"""A small model with random weights, and a server around one on a port of its own."""

from __future__ import annotations

import asyncio
import faulthandler
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import uvicorn

from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers import Denoiser
from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.model import Model
from unmask.objectives.mdlm import MDLM
from unmask.server.access import Access
from unmask.server.app import make_app
from unmask.server.jobs import Jobs
from unmask.server.lifecycle import configure, listen
from unmask.server.limits import Limits

WINDOW = 32


def random_model(
    hidden: int = 32, blocks: int = 1, heads: int = 2, seed: int = 0, *, described: Denoiser | None = None
) -> Model:
    """Bytes, weights of a size at which every input matters; letters beyond ASCII are unlikely. described: a network
    other than the DiT, whose head has a bias."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer("bytes")
    described = described or DiT(hidden=hidden, blocks=blocks, heads=heads, dropout=0)
    network = described.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    with torch.no_grad():
        for p in network.parameters():
            p.normal_(std=0.3)
        if isinstance(network, DiTNetwork):
            network.output.bias[:32] = network.output.bias[127:] = -9.0
    return Model(denoiser=network, tokenizer=tokenizer, objective=MDLM(form="count"), length=WINDOW)


@dataclass
class Running:
    """A server in a thread of this process."""

    url: str
    port: int
    jobs: Jobs
    server: uvicorn.Server
    thread: threading.Thread


@contextmanager
def running(
    model: Model,
    *,
    name: str = "small",
    access: Access = Access(),
    limits: Limits = Limits(),
    max_batch: int = 16,
    port: int = 0,
) -> Iterator[Running]:
    """port: 0 takes any that is free."""
    app = make_app(model, name=name, access=access, limits=limits, max_batch=max_batch)
    with listen("127.0.0.1", port) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(configure(app, drain=20))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
            assert thread.is_alive()
        try:
            yield Running(f"http://127.0.0.1:{port}", port, app.jobs, server, thread)
        finally:
            server.should_exit = True
            thread.join(timeout=60)
            if thread.is_alive():
                faulthandler.dump_traceback()  # what it still waits for
            assert not thread.is_alive()
