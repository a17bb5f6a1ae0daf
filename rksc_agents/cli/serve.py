"""``rksc serve``: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from rksc_agents.cli import common, options, plans
from rksc_agents.config import DEFAULT_MODEL, EngineConfig
from rksc_agents.errors import ConfigError


def serve(
    *,
    model: common.Model = DEFAULT_MODEL,
    gguf_file: common.GGUFFile = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; its own name if left out.")] = None,
    strategy: plans.Name = "direct",
    branches: plans.Branches = None,
    exits: options.Exit = "auto",
    kv_budget: options.KVBudget = None,
    int8: options.Int8 = False,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the key that clients must send.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a branch that a client may ask for.")] = 4096,
    max_branches: Annotated[int, typer.Option(min=1, help="Branches of a request.")] = 64,
    queue: Annotated[int, typer.Option(min=1, help="Requests inside; one more is answered with 429.")] = 256,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a request may take.")] = 600.0,
) -> None:
    """Serve MODEL to OpenAI clients: they choose a strategy by the model's name, NAME@self-consistency:8."""
    key = None if api_key_file is None else _key(api_key_file)
    if key is None and not _loopback(host):
        raise typer.BadParameter(f"--host {host!r} lets others in: give --api-key-file, or leave --host at 127.0.0.1")
    chosen = plans.plan(strategy, branches=branches)
    try:
        import uvicorn

        from rksc_agents.serve import Limits, make_app
    except ModuleNotFoundError as error:
        raise ConfigError(f"rksc serve needs more packages ({error}): pip install 'rksc-agents[serve]'") from error
    limits = Limits(max_tokens=max_tokens, branches=max_branches, in_flight=queue, timeout_s=timeout)
    engine = EngineConfig(kv_budget=options.kv_budget(kv_budget), int8=int8)
    certified = options.exit_of(exits)
    with common.load_reasoner(model, gguf_file, engine=engine, exit=certified, strategy=chosen) as reasoner:
        app = make_app(reasoner, name=name, api_key=key, limits=limits)
        uvicorn.run(app, host=host, port=port, log_level="info", timeout_graceful_shutdown=int(timeout))


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _key(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--api-key-file {str(path)!r} cannot be read ({error})") from None
    if len(key) < 16:
        raise typer.BadParameter(f"--api-key-file {str(path)!r} holds a key of {len(key)} characters: give 16 or more")
    return key
