"""Connects to a server that serves a model of the user's own, for whatever judges or keeps its answers.

Invariants:
- Each run has names of its own, so that its requests are in no cache of an earlier one.
"""

from __future__ import annotations

import secrets

from kvcheck.commands.live import DEFAULT_CONCURRENCY, ServerOptions, client_of, describe
from kvcheck.commands.options import draw_seed
from kvcheck.core.live.clients.client import Client
from kvcheck.core.live.exchange import Served
from kvcheck.core.live.line import check_sizes
from kvcheck.core.live.own.plan import OwnPlan
from kvcheck.core.live.own.prompts import USUAL_IDS
from kvcheck.core.live.own.runner import USUAL_LENGTH

DEFAULT_REQUESTS = 50


def connected(
    target: str, server: ServerOptions, *, requests: int | None, seed: int | None
) -> tuple[Client, Served, OwnPlan]:
    """The client, what the server says of itself, and the plan that all rounds share. Raises UsageError."""
    sizes = {
        "requests": requests or DEFAULT_REQUESTS,
        "concurrency": DEFAULT_CONCURRENCY if server.concurrency is None else server.concurrency,
    }
    check_sizes(**sizes)
    client = client_of(target, server, None)
    served = describe(client, server)
    plan = OwnPlan(
        situation="",
        target=target,
        decode=server.decode,
        engine=served.engine,
        seed=draw_seed() if seed is None else seed,
        names=secrets.randbelow(1 << 32),
        vocabulary=USUAL_IDS if server.vocabulary is None else server.vocabulary,
        **sizes,
        longest=min(served.longest or USUAL_LENGTH, USUAL_LENGTH),
        pool=served.pool,
        admin=int(server.admin),
    )
    return client, served, plan
