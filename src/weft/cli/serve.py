"""`weft serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import os

from weft.cli.options import RUN, add_common, example, percentage, whole
from weft.errors import UsageError, need
from weft.processor import MAX_THREADS, limit_spinning
from weft.serve.settings import LARGEST_BATCH, MAX_BATCH, RUNTIMES, TOKEN, Settings

HELP = "serve a model over HTTP: a web page, and /predict for programs"

NEEDS = ("fastapi", "uvicorn", "multipart", "prometheus_client")

EXAMPLE = """
weft serve runs/photos
curl --data-binary @cat.jpg -H "Content-Type: image/jpeg" "http://127.0.0.1:8000/predict?top_k=3"
curl -F image=@cat.jpg -F image=@dog.jpg http://127.0.0.1:8000/predict

The page is at /, the API description at /openapi.json. For a run, weft serves the fastest of its model and its exports,
by measurement (weft export runs/photos runs/photos/int8 --format openvino --precision int8 --data photos/).
Ctrl-C and SIGTERM drain the service: accepted requests are answered first. SIGHUP reloads the model without dropping
requests. The default address is reachable from this machine only; with another --host, clients need the token that is
printed, or the one in the environment variable WEFT_TOKEN.

With the default --max-pixels, each decoder process may use up to 3.0 GiB. On a machine with little memory, lower the
limit: with --max-pixels 12000000 (12 megapixels), a decoder may use up to 0.4 GiB.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    defaults = Settings
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("--host", default=defaults.host, help=f"address to listen on (default: {defaults.host})")
    parser.add_argument(
        "--port",
        metavar="N",
        default=defaults.port,
        help=f"port to listen on; 0 for any free port (default: {defaults.port})",
    )
    parser.add_argument("--name", action="append", default=[], help="additional host name of the service; repeatable")
    parser.add_argument("--proxy", action="append", default=[], help="address of a trusted reverse proxy; repeatable")
    parser.add_argument("--no-token", action="store_true", help="disable authentication, also for remote clients")
    parser.add_argument(
        "--runtime", default=defaults.runtime, choices=RUNTIMES, help="inference runtime (default: auto)"
    )
    parser.add_argument(
        "--workers", metavar="N", default=1, help="server processes, each with its own model (default: 1)"
    )
    parser.add_argument("--decoders", metavar="N", help="image decoder processes (default: one per core, at most 4)")
    add_common(parser, "--device", "--precision", "--threads", "--reject-at-error")
    parser.add_argument(
        "--max-batch",
        metavar="N",
        help=f"maximum images per forward pass (default: measured at the start, at most {MAX_BATCH})",
    )
    parser.add_argument(
        "--max-latency-ms",
        metavar="N",
        help="limit batches so that a forward pass takes at most half of this time, in ms (default: no limit)",
    )
    for option, text in (
        ("--max-wait-ms", "maximum time to wait for a batch to fill, in ms"),
        ("--max-queue", "maximum number of waiting images; more are refused with status 429"),
        ("--max-images", "maximum images per request"),
        ("--max-bytes", "maximum bytes per request"),
        ("--max-pixels", "maximum pixels per image; a decoder may use 64 MiB + 32 bytes per pixel"),
        ("--decode-timeout", "maximum time to decode an image, in s; then its decoder is killed"),
        ("--read-timeout", "maximum time to receive a request, in s"),
        ("--timeout", "maximum time to compute a response, in s"),
        ("--drain", "time after SIGTERM before the port is closed, in s; /ready returns 503"),
    ):
        value = getattr(defaults, option[2:].replace("-", "_"))
        parser.add_argument(option, metavar="N", default=value, help=f"{text} (default: {value})")
    parser.add_argument("--log", action="store_true", help="log every request to stderr")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops the service."""
    need("serve", *NEEDS)
    settings = Settings(
        run=args.run,
        host=args.host,
        port=0 if str(args.port) == "0" else whole("--port", args.port),
        runtime=args.runtime,
        device=args.device or "auto",
        precision=args.precision or "fp32",
        reject_at_error=percentage("--reject-at-error", args.reject_at_error),
        threads=None if args.threads is None else whole("--threads", args.threads, MAX_THREADS),
        workers=whole("--workers", args.workers, 1024),
        max_batch=None if args.max_batch is None else whole("--max-batch", args.max_batch, LARGEST_BATCH),
        max_latency_ms=None if args.max_latency_ms is None else _number("--max-latency-ms", args.max_latency_ms),
        max_wait_ms=_number("--max-wait-ms", args.max_wait_ms),
        max_queue=whole("--max-queue", args.max_queue),
        max_bytes=whole("--max-bytes", args.max_bytes),
        max_pixels=whole("--max-pixels", args.max_pixels),
        max_images=whole("--max-images", args.max_images),
        decoders=None if args.decoders is None else whole("--decoders", args.decoders, 1024),
        decode_timeout=_number("--decode-timeout", args.decode_timeout),
        read_timeout=_number("--read-timeout", args.read_timeout),
        timeout=_number("--timeout", args.timeout),
        drain=_number("--drain", args.drain),
        names=tuple(args.name),
        proxies=tuple(args.proxy),
        token=os.environ.get(TOKEN) or None,
        is_open=args.no_token,
        log=args.log,
    )
    from weft.checkpoints.resolve import check_model

    check_model(args.run)
    limit_spinning()
    from weft.serve import serve

    serve(settings)
    return 0


def _number(option: str, text: object) -> float:
    try:
        return float(str(text))
    except ValueError:
        raise UsageError(f"{option} must be a number; got {text}.") from None
