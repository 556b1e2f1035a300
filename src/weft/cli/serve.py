"""`weft serve`: serve a model over HTTP."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from cyclopts import Parameter

from weft.cli import options as opt
from weft.cli.options import flat, given, in_group, parsed
from weft.errors import need
from weft.machine.processor import limit_spinning
from weft.recipes.describe import field_texts, first_sentence
from weft.recipes.fields import seconds_of
from weft.serve import settings as service
from weft.serve.settings import TOKEN, Settings

NEEDS = ("fastapi", "uvicorn", "multipart", "prometheus_client")
FLAGS = {"names": "--name", "proxies": "--proxy", "is_open": "--no-token"}  # of fields with another name
MACHINE = ("runtime", "img_size", "device", "precision", "threads", "workers", "decoders")
TEXTS, HINTS = field_texts(service)["Settings"], get_type_hints(Settings)
Time = Annotated[
    float | None,
    Parameter(converter=parsed(functools.partial(seconds_of, may_be_zero=True)), metavar="TIME"),
]


def option(field: Field[Any]) -> Any:
    """Return the option of a setting of the service: a duration for a number of seconds or milliseconds."""
    hint, default = HINTS[field.name], cast(Any, field.default)
    kinds = {hint, get_origin(hint), *get_args(hint)}
    help, more = re.sub(r", in m?s\b", "", first_sentence(TEXTS.get(field.name, ""))), dict[str, Any]()
    if field.name == "reject_at_error":
        return opt.Percent
    if float in kinds:
        is_short = field.name in ("max_latency", "max_wait")
        text = "" if not default else f"{1000 * default:g}ms" if is_short else f"{default:g}s"
        kind, shown = opt.Latency if is_short else Time, text
    elif field.name in ("img_size", "threads"):
        kind, shown = (opt.ImageSize if field.name == "img_size" else opt.Threads), ""
    elif field.name == "max_bytes":
        kind, shown = opt.Size, f"{default / 1e6:.3g}MB"
    elif get_origin(hint) is Literal:
        more = {"metavar": "|".join(get_args(hint)), "choices": get_args(hint)}
        kind, shown = str | None, str(default)
    elif tuple in kinds:
        kind, shown, more = list[str] | None, "", {"metavar": "NAME" if field.name == "names" else "ADDRESS"}
    else:
        kind = next(each for each in (bool, int, str) if each in kinds) | None
        shown = "" if default in (None, False) else str(default)
        more = {"metavar": "N"} if int in kinds else {"metavar": "HOST"} if str in kinds else {}
    flag = FLAGS.get(field.name, f"--{field.name.replace('_', '-')}")
    text = f"{help[:1].lower()}{help[1:]}{f' (default: {shown})' if shown else ''}"
    return Annotated[kind, in_group("Machine" if field.name in MACHINE else "Options", name=flag, help=text, **more)]


if TYPE_CHECKING:

    class Service:
        """The settings of the service."""

else:  # every setting of the service but the model and the token
    LISTED = {field.name: option(field) for field in fields(Settings) if field.name not in ("run", "token")}
    Service = flat(type("Service", (), {"__annotations__": LISTED, **dict.fromkeys(LISTED)}))


def serve(
    run: opt.Run,
    /,
    *,
    settings: Service = Service(),
    plugins: opt.Plugins = opt.Plugins(),
) -> int:
    """Serve a model over HTTP: a web page, and /predict for programs.

    Example:
        weft serve runs/photos
        curl --data-binary @cat.jpg -H "Content-Type: image/jpeg" "http://127.0.0.1:8000/predict?top_k=3"
        curl -F image=@cat.jpg -F image=@dog.jpg http://127.0.0.1:8000/predict

        The page is at /, the API description at /openapi.json. For a run, weft serves the fastest of its model and its
        exports, by measurement (weft export runs/photos runs/photos/int8 --format openvino --precision int8
        --data photos/).
        Ctrl-C and SIGTERM drain the service: accepted requests are answered first. SIGHUP reloads the model without
        dropping requests. The default address is reachable from this machine only; with another --host, clients need
        the token that is printed, or the one in the environment variable WEFT_TOKEN.

        With the default --max-pixels, each decoder process may use up to 3.0 GiB. On a machine with little memory,
        lower the limit: with --max-pixels 12000000 (12 megapixels), a decoder may use up to 0.4 GiB.
    """
    from weft.recipes.checks import image_size  # imports pydantic

    need("serve", *NEEDS)
    values = given(settings)
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    values |= {name: int(value) for name, value in values.items() if name == "max_bytes"}
    values |= {name: image_size(value) for name, value in values.items() if name == "img_size"}
    checked = Settings(run=run, token=os.environ.get(TOKEN) or None, **values)
    from weft.checkpoints.resolve import check_model

    check_model(run)
    limit_spinning()
    import weft.serve as library

    library.serve(checked)
    return 0
