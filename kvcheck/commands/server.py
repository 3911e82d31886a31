"""Access to a running server: its address, its key, and the limits on requests.

Invariants:
- A key comes from the environment by name. It is in no record, line or message.
- Only --admin allows flush, pause and reset; only --allow-remote allows another machine.
- Names are new in each run, so that no request is in the cache of an earlier one.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands.options import check_positive, draw_seed, heading
from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.clients.client import Client, Trouble
from kvcheck.core.live.clients.connection import Connection, check_address, connect
from kvcheck.core.live.exchange import Served
from kvcheck.core.live.line import USUAL_IDS, OwnPlan, check_sizes
from kvcheck.core.live.own.runner import USUAL_LENGTH
from kvcheck.core.model.alphabet import Alphabet

if TYPE_CHECKING:
    from kvcheck.core.model.folder import KnownAnswers

DEFAULT_REQUESTS = 24
DEFAULT_OWN_REQUESTS = 50
DEFAULT_CONCURRENCY = 8
DEFAULT_TIMEOUT_S = 120.0
MOST_TIMEOUT_S = 86400.0
MASK = "<key>"
SERVED = ("engine", "version", "model", "longest", "pool", "page", "mode")
reached, sent = heading("How the server is reached"), heading("What is sent")
answers = heading("Which answers are right")

Url = Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")]
KNOWN_ANSWERS = answers(
    "--known-answers", metavar="DIR", help="The model that the server serves, by kvcheck model make."
)
Vocabulary = Annotated[
    int | None,
    sent(
        metavar="N", help="With a model of your own: token ids below N are sent. Default: 1000, which every model has."
    ),
]
Decode = Annotated[str | None, reached(metavar="URL", help="Decode server of a pair; URL is its prefill server.")]
Api = Annotated[str | None, reached(help="sglang, vllm, llamacpp or openai. Default: by what the server answers.")]
Metrics = Annotated[
    list[str] | None, reached(metavar="URL", help="Metrics of the server, repeatable. Default: its own /metrics.")
]
Concurrency = Annotated[int, sent(help="Requests at a time.")]
Timeout = Annotated[float, reached(help="Seconds of silence after which a request to a server is given up.")]
KeyEnv = Annotated[
    str | None, reached(metavar="NAME", help="Environment variable with the server's API key. It is not recorded.")
]
Admin = Annotated[bool, reached("--admin", help="Allow calls that retract all that runs; SGLang pauses.")]
AllowRemote = Annotated[bool, reached("--allow-remote", help="Allow a server on another machine.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server, or a pair. url: the only one, or that of the prefill server."""

    url: str = ""
    decode: str | None = None
    api: str | None = None
    metrics: tuple[str, ...] = ()
    timeout_s: float = DEFAULT_TIMEOUT_S
    key_env: str | None = None
    admin: bool = False
    allow_remote: bool = False

    def __post_init__(self) -> None:
        check_positive("--timeout", self.timeout_s)
        if self.timeout_s > MOST_TIMEOUT_S:
            raise UsageError(f"--timeout: expected at most {MOST_TIMEOUT_S:,.0f} seconds, got {self.timeout_s:g}")
        for name, address in (("--decode", self.decode), *(("--metrics", each) for each in self.metrics)):
            if address is not None:
                check_address(name, address)

    def client(self, known: KnownAnswers | None) -> Client:
        """known: the model, if its answers are known. Raises UsageError."""
        words = {} if known is None else {word: n for n, word in enumerate(Alphabet(known.parameters).words())}
        return connect(
            Connection(
                target=self.url,
                decode=self.decode,
                engine=self.api,
                metrics=self.metrics,
                key=self._key(),
                timeout_s=self.timeout_s,
                allow_remote=self.allow_remote,
                token_of=words.get,
            )
        )

    def _key(self) -> str | None:
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env)
        if not key:
            raise UsageError(f"--key-env {self.key_env}: expected an environment variable with a key, found none")
        return key

    def describe(self, client: Client) -> Served:
        """Return the server's self-description, its key masked. Raises UsageError."""
        try:
            served = client.served()
        except Trouble as trouble:
            raise UsageError(f"the server does not say what it is: {trouble}") from trouble
        key = self._key()
        if key is None:
            return served

        def masked(value: object) -> object:
            return value.replace(key, MASK) if isinstance(value, str) else value

        texts = {name: masked(getattr(served, name)) for name in ("version", "model")}
        facts = {str(masked(name)): masked(fact) for name, fact in served.facts.items()}
        return dataclasses.replace(served, facts=facts, **texts)  # type: ignore[arg-type]

    def connected(
        self, *, requests: int | None, concurrency: int, vocabulary: int | None, seed: int | None
    ) -> tuple[Client, Served, OwnPlan]:
        """Return the client of an own model, and the plan that all rounds share. Raises UsageError."""
        sizes = {"requests": requests or DEFAULT_OWN_REQUESTS, "concurrency": concurrency}
        check_sizes(**sizes)
        client = self.client(None)
        served = self.describe(client)
        plan = OwnPlan(
            situation="",
            target=self.url,
            decode=self.decode,
            engine=served.engine,
            seed=draw_seed() if seed is None else seed,
            names=secrets.randbelow(1 << 32),
            vocabulary=USUAL_IDS if vocabulary is None else vocabulary,
            **sizes,
            longest=min(served.longest or USUAL_LENGTH, USUAL_LENGTH),
            pool=served.pool,
            admin=int(self.admin),
        )
        return client, served, plan


def known_answers(folder: Path) -> KnownAnswers:
    from kvcheck.core.model.folder import read_model  # it needs torch, which a command's help does not

    return read_model(folder)


def facts_of(served: Served, **facts: object) -> dict[str, object]:
    return {**facts, **{name: getattr(served, name) for name in SERVED}, "said": dict(served.facts)}
