"""The service on Ray Serve: replicas on several machines behind a load balancer.

    serve run weft.serve.on_ray:application run=/shared/runs/photos replicas=4

Every copy is the application of `weft serve`, with its batching and its limits; all machines must see the model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from weft.errors import UsageError, install_command, unknown
from weft.models.plugins import VARIABLE as PLUGINS
from weft.serve.settings import TOKEN, Settings

try:
    from ray import serve
except ImportError as error:
    command = install_command("serve,ray")
    raise UsageError(f"ray[serve] is needed for this, and is not installed. Run: {command}") from error

# of a single machine, or not to be read in a list of processes
HERE = ("host", "port", "workers", "drain", "grace", "token", "is_open", "log")


def application(args: Mapping[str, str]) -> serve.Application:
    """What `serve run` and `serve.run` take.

    Args:
        args: `run`, `replicas` (default: 1), and whatever else is in `Settings` and not of a single machine, as text;
            `names` and `proxies` with commas between.

    The token that clients must send is that of the environment variable WEFT_TOKEN here; without it there is none.

    Raises:
        UsageError: a word that does not fit.
    """
    words = dict(args)
    replicas = int(words.pop("replicas", 1))
    kinds = {field.name: field.type for field in dataclasses.fields(Settings) if field.name not in HERE}
    for word in words:
        if word not in kinds:
            raise unknown("setting", word, [*kinds, "replicas"], "weft.serve.Settings")
    if "run" not in words:
        raise UsageError("run must name what is served: run=/shared/runs/photos.")
    token = os.environ.get(TOKEN) or None
    plugins = os.environ.get(PLUGINS, "")
    given = {name: _read(name, str(kinds[name]), text) for name, text in words.items()}
    settings = Settings(**given, host="0.0.0.0", token=token, is_open=token is None)

    def build() -> Any:
        from weft.serve.app import create_app

        os.environ[PLUGINS] = plugins
        return create_app(settings)

    waiting = settings.max_queue + settings.max_batch
    copies = serve.deployment(num_replicas=replicas, max_ongoing_requests=waiting)(serve.ingress(build)())
    return copies.bind()


def _read(name: str, kind: str, text: str) -> Any:
    if name in ("names", "proxies"):
        return tuple(text.split(","))
    try:
        return int(text) if kind.startswith("int") else float(text) if kind == "float" else text
    except ValueError:
        raise UsageError(f"{name} must be a number; got {text}.") from None
