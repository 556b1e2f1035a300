"""`weft serve`: a model as an HTTP service with a page."""

from __future__ import annotations

import argparse
import os

from weft.cli.options import add_common, example, whole
from weft.errors import UsageError, need
from weft.processor import MAX_THREADS
from weft.serve.settings import RUNTIMES, TOKEN, Settings

HELP = "answer over HTTP: a page for people, /predict for programs"

NEEDS = ("fastapi", "uvicorn", "httptools", "multipart", "prometheus_client")

EXAMPLE = """
weft serve runs/photos
curl --data-binary @cat.jpg -H "Content-Type: image/jpeg" "http://127.0.0.1:8000/predict?top_k=3"
curl -F image=@cat.jpg -F image=@dog.jpg http://127.0.0.1:8000/predict

The page is at /, the description of the interface at /openapi.json. Of a run, the quickest export beside its model
answers (weft export runs/photos runs/photos/int8 --format openvino --precision int8 --data photos/), else torch.
Ctrl-C or SIGTERM: what was accepted is answered, then it ends. SIGHUP: the model is loaded anew, nothing is dropped.
Only this machine reaches it, unless --host says otherwise; then clients need the token that is printed, or the one in
the environment variable WEFT_TOKEN.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    usual = Settings(run="")
    parser.add_argument("run", metavar="RUN", help="a run directory, a model directory or an export")
    parser.add_argument("--host", default=usual.host, help=f"address to listen on (default: {usual.host})")
    parser.add_argument("--port", metavar="N", default=usual.port, help=f"0 for any (default: {usual.port})")
    parser.add_argument("--name", action="append", default=[], help="one more name that clients may call it by")
    parser.add_argument("--proxy", action="append", default=[], help="address of a proxy that says who the client is")
    parser.add_argument("--no-token", action="store_true", help="whoever reaches it may ask, from other machines, too")
    parser.add_argument("--runtime", default=usual.runtime, choices=RUNTIMES, help="what answers (default: auto)")
    parser.add_argument(
        "--workers", metavar="N", default=1, help="processes, each with a model of its own (default: 1)"
    )
    parser.add_argument(
        "--decoders", metavar="N", help="processes that decode images (default: one per core, at most 4)"
    )
    add_common(parser, "--device", "--precision", "--threads")
    for option, what in (
        ("--max-batch", "pictures in one forward pass"),
        ("--max-wait-ms", "milliseconds for which a picture waits for others"),
        ("--max-queue", "pictures that may wait; more are refused with 429"),
        ("--max-images", "pictures in one request"),
        ("--max-bytes", "bytes of one request"),
        ("--max-pixels", "pixels of one picture"),
        ("--decode-timeout", "seconds after which the decoder of an image is killed"),
        ("--read-timeout", "seconds in which a request must have come"),
        ("--timeout", "seconds in which a request is answered"),
        ("--drain", "seconds between unready and closed when it is stopped by SIGTERM"),
    ):
        value = getattr(usual, option[2:].replace("-", "_"))
        parser.add_argument(option, metavar="N", default=value, help=f"{what} (default: {value})")
    parser.add_argument("--log", action="store_true", help="a line on stderr for every answer")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Serves until it is told to stop."""
    need("serve", *NEEDS)
    settings = Settings(
        run=args.run,
        host=args.host,
        port=0 if str(args.port) == "0" else whole("--port", args.port),
        runtime=args.runtime,
        device=args.device or "auto",
        precision=args.precision or "fp32",
        threads=None if args.threads is None else whole("--threads", args.threads, MAX_THREADS),
        workers=whole("--workers", args.workers, 1024),
        max_batch=whole("--max-batch", args.max_batch),
        max_wait_ms=_seconds("--max-wait-ms", args.max_wait_ms),
        max_queue=whole("--max-queue", args.max_queue),
        max_bytes=whole("--max-bytes", args.max_bytes),
        max_pixels=whole("--max-pixels", args.max_pixels),
        max_images=whole("--max-images", args.max_images),
        decoders=None if args.decoders is None else whole("--decoders", args.decoders, 1024),
        decode_timeout=_seconds("--decode-timeout", args.decode_timeout),
        read_timeout=_seconds("--read-timeout", args.read_timeout),
        timeout=_seconds("--timeout", args.timeout),
        drain=_seconds("--drain", args.drain),
        names=tuple(args.name),
        proxies=tuple(args.proxy),
        token=os.environ.get(TOKEN) or None,
        is_open=args.no_token,
        log=args.log,
    )
    from weft.serve import serve

    serve(settings)
    return 0


def _seconds(option: str, text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        raise UsageError(f"{option} must be a number; got {text}.") from None
