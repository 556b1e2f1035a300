"""The service on Ray Serve: replicas on several machines behind a load balancer.

    serve run weft.serve.on_ray:application run=/shared/runs/photos replicas=4

Every replica is the application of `weft serve`, with its batching and its limits. All machines must be able to read
the model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from weft.errors import UsageError, install_command, unknown
from weft.models.families import PLUGINS
from weft.serve.settings import MAX_BATCH, TOKEN, Settings

try:
    from ray import serve
except ImportError as error:
    command = install_command("serve", "ray")
    raise UsageError(f"ray[serve] is needed for this, and is not installed. Run: {command}") from error

# settings that concern a single machine, or that must not be visible in a list of processes
NOT_SUPPORTED = ("host", "port", "workers", "drain", "grace", "token", "is_open", "log")


def application(args: Mapping[str, str]) -> serve.Application:
    """Return the application for `serve run` and `serve.run`.

    Clients must send the token in the environment variable WEFT_TOKEN of this process. If it is not set, the service
    has no authentication.

    Args:
        args: values as text: `run`, `replicas` (default: 1), and any field of `Settings` that is not in NOT_SUPPORTED;
            `names` and `proxies` are separated by commas.

    Raises:
        UsageError: an unknown name, a value that is out of range, or no `run`.
    """
    texts = dict(args)
    replicas = _parse("replicas", "int", texts.pop("replicas", "1"))
    if replicas < 1:
        raise UsageError(f"replicas must be at least 1; got {replicas}.")
    types = {field.name: field.type for field in dataclasses.fields(Settings) if field.name not in NOT_SUPPORTED}
    for name in texts:
        if name not in types:
            raise unknown("setting", name, [*types, "replicas"], "weft.serve.Settings")
    if "run" not in texts:
        raise UsageError("run must be the run or model directory to serve; got none. Pass run=/shared/runs/photos.")
    token = os.environ.get(TOKEN) or None
    plugins = os.environ.get(PLUGINS, "")
    values = {name: _parse(name, str(types[name]), text) for name, text in texts.items()}
    settings = Settings(**values, host="0.0.0.0", token=token, is_open=token is None)

    def build() -> Any:
        from weft.serve.app import create_app

        os.environ[PLUGINS] = plugins
        return create_app(settings)

    max_requests = settings.max_queue + (settings.max_batch or MAX_BATCH)
    deployment = serve.deployment(num_replicas=replicas, max_ongoing_requests=max_requests)(serve.ingress(build)())
    return deployment.bind()


def _parse(name: str, kind: str, text: str) -> Any:
    if name in ("names", "proxies"):
        return tuple(text.split(","))
    try:
        return int(text) if kind.startswith("int") else float(text) if kind.startswith("float") else text
    except ValueError:
        raise UsageError(f"{name} must be a number; got {text}.") from None
