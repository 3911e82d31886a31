"""`kvcheck model`: make a known-answer model, print its right answers, keep a server's answers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcheck.commands.command import CONTEXT, Command, group
from kvcheck.commands.options import Format
from kvcheck.commands.reference import reference
from kvcheck.commands.terminal import print_json, say, say_fitting
from kvcheck.core.base.errors import UsageError

if TYPE_CHECKING:
    from kvcheck.core.model.folder import KnownAnswers

DEFAULT_NODES = 4096
MOST_TOKENS = 1 << 20
SERVED = 2048
"""Tokens of a request at most, on a server with so few pages that it has to preempt and evict."""
SERVERS = {
    "http://127.0.0.1:8000": "VLLM_SERVER_DEV_MODE=1 vllm serve {folder} --port 8000 --max-model-len {length} "
    "--num-gpu-blocks-override 140 --enable-prompt-tokens-details --scheduling-policy priority",
    "http://127.0.0.1:30000": "python -m sglang.launch_server --model-path {folder} --port 30000 --context-length "
    "{length} --max-total-tokens 3200 --page-size 16 --schedule-conservativeness 0.1 --enable-metrics "
    "--enable-cache-report",
}
"""Address: the line that starts a server there, as in docs/live.md."""


Window = Annotated[
    int | None, typer.Option(help="Positions that a windowed layer reads. Default: a quarter of --length, at most 128.")
]
TopK = Annotated[
    int | None, typer.Option(help="Positions that an indexer picks. Default: a quarter of --length, at most 128.")
]
KvScale = Annotated[
    int, typer.Option(help="With fp8-kv and llama: scales in the checkpoint, this one the largest: 2, 4, 8 or 16.")
]


app = group()


@app.command(cls=Command, context_settings=CONTEXT)
def make(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the model.")],
    arch: Annotated[
        str,
        typer.Option(
            help="llama (MHA, GQA and MQA), deepseek-v3 (MLA), deepseek-v32 (MLA with an indexer), gpt-oss (windows "
            "and sinks) or qwen3-next (states)."
        ),
    ] = "llama",
    layers: Annotated[int, typer.Option(help="Layers; each without a window makes one hop of a walk.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="KV heads; each returns its own digits of a token.")] = 4,
    group: Annotated[int | None, typer.Option(help="Query heads of one KV head. Default: 2; 1 with MLA.")] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Dimensions of a head; a multiple of 64. Default: 64; MLA: 128; qwen3-next: 256.")
    ] = None,
    length: Annotated[int, typer.Option(help="Most tokens of a request and its answer together.")] = 4096,
    dtype: Annotated[
        str, typer.Option(help="bf16, fp16, fp32, or fp8-kv (bf16 weights for a cache in FP8 E4M3).")
    ] = "bf16",
    kv_scale: KvScale = 1,
    nodes: Annotated[
        int | None,
        typer.Option(help="Different tokens that prompts are made of. Default: 4096, or as many as --length needs."),
    ] = None,
    distance: Annotated[
        int | None,
        typer.Option(help="How far back the position test reads. Default: a quarter of --length, at most 256."),
    ] = None,
    window: Window = None,
    top_k: TopK = None,
    format_name: Format = "text",
) -> None:
    """Write a model folder as vLLM, SGLang and transformers load it, with known_answers.json beside its weights."""
    from kvcheck.core.model import FAMILIES
    from kvcheck.core.model.family import fit_digits
    from kvcheck.core.model.folder import write_model
    from kvcheck.core.model.parameters import Parameters, check_sizes

    family = FAMILIES.load(arch)
    group, head_dim = family.size("group", group), family.size("head_dim", head_dim)
    if kv_scale > 1 and not family.has_scales:
        raise UsageError(f"--kv-scale: {arch} has no scales of keys and values; leave it out")
    check_sizes(layers=layers, kv_heads=kv_heads, group=group, head_dim=head_dim, length=length, dtype=dtype)
    nodes = min(max(DEFAULT_NODES, length), family.most_nodes) if nodes is None else nodes
    digits, base = fit_digits(nodes=nodes, kv_heads=kv_heads, room=family.room(head_dim, length))
    parameters = Parameters(
        family=arch,
        layers=layers,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        length=length,
        dtype=dtype,
        nodes=nodes,
        digits=digits,
        base=base,
        distance=min(256, length // 4) if distance is None else distance,
        top_k=min(family.top_k, length // 4) if top_k is None else top_k,
        kv_scale=kv_scale,
        window=min(family.window, length // 4) if window is None else window,
    )
    _print_made(write_model(parameters, out), out, format_name)


def _print_made(known: KnownAnswers, out: Path, format_name: str) -> None:
    made, folder = known.parameters, shlex.quote(str(out))
    size = sum((out / name).stat().st_size for name in known.files)
    next_lines = [
        {
            "serve": serve.format(folder=folder, length=min(SERVED, made.length)),
            "check": f"kvcheck live {url} --known-answers {folder} --admin",
        }
        for url, serve in SERVERS.items()
    ]
    if format_name == "json":
        sizes = {"size_bytes": size, "parameters": made.to_json()}
        print_json({"folder": str(out), "digest": known.digest, **sizes, "next": next_lines})
        return
    sizes_text = f"{made.layers} layers, {made.kv_heads} KV heads, {made.nodes} nodes, {size / 1e6:.1f} MB"
    say_fitting(f" made   {out}: {made.family}, {sizes_text}, digest {known.digest}")
    for label, line in zip(("next", "or"), next_lines, strict=True):
        say(f" {label:<6} {line['serve']}")
        say(f" then   {line['check']}")


@app.command(cls=Command, context_settings=CONTEXT)
def answer(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `kvcheck model make` wrote.")],
    prompt: Annotated[
        Path, typer.Option(metavar="FILE", help="JSON list of token ids, as they are sent to the server.")
    ],
    tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 16,
    format_name: Format = "text",
) -> None:
    """Print the token ids that a right server answers, as a JSON list."""
    from kvcheck.core.model.alphabet import Alphabet
    from kvcheck.core.model.answers import answers
    from kvcheck.core.model.folder import read_model

    if not 1 <= tokens <= MOST_TOKENS:
        raise UsageError(f"--tokens is from 1 to {MOST_TOKENS}; got {tokens}")
    known = read_model(folder)
    ids = list(answers(Alphabet(known.parameters), read_ids(prompt), tokens))
    if format_name == "json":
        print_json({"digest": known.digest, "tokens": ids})
    else:
        say(json.dumps(ids))


app.command("reference", cls=Command, context_settings=CONTEXT)(reference)


def read_ids(path: Path) -> list[int]:
    """Return the token ids in a file. Raises UsageError unless it is a JSON list of whole numbers."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: expected a JSON list of token ids, got text that is not JSON ({error})") from error
    if not isinstance(data, list) or not all(type(token) is int and token >= 0 for token in data):
        raise UsageError(f"{path}: expected a JSON list of token ids, each a whole number from 0")
    return data
