"""The HTTP application: routes, JSON schemas and error responses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from PIL import Image
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from weft.data import BadImage
from weft.data.preprocessing import Pixels
from weft.deploy.choosing import BATCH_SIZES
from weft.inference.predictor import ImagePrediction, Predictor
from weft.memory import keep_memory
from weft.processor import begin_in_thread, call_in_thread, set_num_threads
from weft.serve.batching import Batcher, ModelError, QueueFull, batch_limit
from weft.serve.decoding import DecoderPool, NoDecoderError
from weft.serve.forms import Upload, parse_form
from weft.serve.guard import CLOSE, RETRY_LATER, BodyReader, Guard, Json, RequestError, discard_body, error_response
from weft.serve.metrics import MULTIPROC_DIR, Metrics
from weft.serve.schemas import BODY, ERRORS, Prediction
from weft.serve.settings import MAX_BATCH, Settings
from weft.system import lock_file
from weft.text import one_line, printable
from weft.version import __version__

T = TypeVar("T")
PAGE_FILES = {"app.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
MIN_GAIN = 1.05  # of the throughput, for which a batch may have twice as many images and take twice as long
PATHS = ("/", "/predict", "/model", "/health", "/live", "/ready", "/metrics")
STATUS_OF_REASON = {  # HTTP status for an image that cannot be used; 400 for all other reasons
    "not-an-image": 415,
    "too-many-pixels": 422,
    "too-thin": 422,
    "compression": 415,
    "metadata-bomb": 422,
    "out-of-memory": 422,
    "too-slow": 422,
    "crashed": 422,
}


class Service:
    """State that the routes share: model, decoders, queue and metrics.

    Args:
        settings: of the service.
        predictor: the model; None to load `settings.run`.

    Attributes:
        max_batch: maximum number of images per forward pass of the current model.
        is_draining: the service is stopping, and refuses new images.
    """

    def __init__(self, settings: Settings, predictor: Predictor | None = None) -> None:
        keep_memory()
        self.settings = settings
        self.predictor, self.max_batch = call_in_thread(lambda: _loaded(settings, predictor))
        metadata = self.predictor.metadata
        self.metrics = Metrics(PATHS, str(metadata["runtime"]), str(metadata["precision"]))
        self.body_reader = BodyReader(settings)
        self.decoders = DecoderPool(
            settings.decoder_count, settings.decode_timeout, settings.max_pixels, settings.decoder_memory
        )
        self.is_draining = False
        self.batcher: Batcher
        self._reloading: asyncio.Task[None] | None = None
        self._is_reload_due = False
        self._loading: Future[tuple[Predictor, int]] | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the queue and the decoders while the block lasts. SIGHUP reloads the model."""
        settings, metrics = self.settings, self.metrics
        self.batcher = Batcher(
            self.max_batch, settings.max_wait_ms / 1000, settings.max_queue, metrics.on_batch, metrics.waiting.set
        )
        self.batcher.start()
        await self.decoders.start()
        loop = asyncio.get_running_loop()
        # only the main thread receives signals, and a replica on Ray runs in another one; Windows has no SIGHUP
        has_signals = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGHUP")
        if has_signals:
            loop.add_signal_handler(signal.SIGHUP, self.begin_reload)
        try:
            yield
        finally:
            if has_signals:
                loop.remove_signal_handler(signal.SIGHUP)
            if self.is_reloading:
                self._reloading.cancel()  # type: ignore[union-attr]
            await self.batcher.close()
            self.decoders.close()

    def begin_reload(self) -> None:
        """Begin to reload the model in the background. Until it is loaded, requests use the current model.

        During a reload, the model is loaded once more afterwards: the files may have changed since it was read.
        """
        self._is_reload_due = True
        if not self.is_reloading:
            self._reloading = asyncio.get_running_loop().create_task(self._reload_all())

    @property
    def is_reloading(self) -> bool:
        """Whether a model is being loaded while the current one serves."""
        return self._reloading is not None and not self._reloading.done()

    @property
    def is_loading(self) -> bool:
        """Whether a thread loads a model, which also a service that has stopped cannot interrupt."""
        return self._loading is not None and not self._loading.done()

    async def _reload_all(self) -> None:
        while self._is_reload_due:
            await self._reload()

    def _load_again(self) -> tuple[Predictor, int]:
        """Load the model; its limit of batches is that of the current one if that runs alike.

        A measurement would share the cores with the requests that are answered meanwhile.
        """
        predictor, keys = load_predictor(self.settings), ("architecture", "runtime", "precision", "input")
        is_alike = all(predictor.metadata.get(key) == self.predictor.metadata.get(key) for key in keys)
        return predictor, self.max_batch if is_alike else _max_batch(self.settings, predictor)

    async def _reload(self) -> None:
        try:
            async with _no_other_worker_reloads():
                self._is_reload_due = False
                self._loading = begin_in_thread(lambda: call_in_thread(self._load_again))
                predictor, max_batch = await asyncio.wrap_future(self._loading)
        except Exception as error:
            self.metrics.reloads.labels("failed").inc()
            log(f"the model was not reloaded; the current model keeps serving: {error}")
            return
        self.predictor, self.max_batch = predictor, max_batch
        self.batcher.max_batch = max_batch
        self.metrics.set_model(str(predictor.metadata["runtime"]), str(predictor.metadata["precision"]))
        self.metrics.reloads.labels("done").inc()
        log("the model was reloaded.")

    def on_response(self, method: str, path: str, status: int, seconds: float, request_id: str) -> None:
        """Count a response, and log it if `settings.log` is set."""
        self.metrics.on_response(method, path, status, seconds)
        if self.settings.log:
            log(f"{status} {method} {printable(path)} {1000 * seconds:.1f} ms {request_id}")

    @property
    def is_ready(self) -> bool:
        """Whether the service accepts new images."""
        is_full = self.batcher.pending >= self.settings.max_queue
        return not (self.is_draining or is_full or self.decoders.is_stuck) and self.batcher.is_running

    async def predict(
        self, uploads: Sequence[Upload], overlay: bool
    ) -> tuple[Predictor, list[ImagePrediction | BadImage]]:
        """Decode images, and run the model on those that can be used.

        Args:
            uploads: the images of one request.
            overlay: also compute attention maps.

        Returns:
            The predictor, and for every image its prediction or the reason why it cannot be used.

        Raises:
            RequestError: the queue is full, the time is up, or the model failed.
        """
        predictor = self.predictor
        try:
            async with asyncio.timeout(self.settings.timeout):
                with self.batcher.reserve(len(uploads)):
                    decoding = (self.decoders.pixels(upload.data, predictor.preprocessing) for upload in uploads)
                    prepared = await asyncio.gather(*decoding)
                images = [item for item in prepared if isinstance(item, Pixels)]
                predictions = iter(await self.batcher.predict(images, predictor, overlay)) if images else iter(())
        except QueueFull as full:
            self.metrics.images.labels("queue-full").inc(len(uploads))
            headers = {"retry-after": str(max(round(full.seconds), 1))}
            raise RequestError(429, "queue-full", "Too many images are waiting; try again later.", headers) from None
        except TimeoutError:
            self.metrics.images.labels("too-late").inc(len(uploads))
            text = f"The response must be ready within {self.settings.timeout:g} seconds; it was not. Try again later."
            raise RequestError(504, "too-late", text, RETRY_LATER) from None
        except NoDecoderError:
            self.metrics.images.labels("no-decoder").inc(len(uploads))
            text = "No process that decodes images can be started at the moment; try again later."
            raise RequestError(503, "busy", text, RETRY_LATER) from None
        except ModelError as error:
            raise RequestError(503, "model-fault", str(error), RETRY_LATER) from None
        for item in prepared:
            if isinstance(item, BadImage):
                self.metrics.images.labels(item.reason).inc()
        return predictor, [item if isinstance(item, BadImage) else next(predictions) for item in prepared]

    def uploads(self, request: Request, body: bytearray) -> list[Upload]:
        """Return the images in the body of a request.

        Raises:
            RequestError: the body is neither an image nor a form with images.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in ("", "application/octet-stream") or kind.startswith("image/"):
            return [Upload("image", body)]
        if kind != "multipart/form-data":
            raise RequestError(
                415,
                "content-type",
                "The Content-Type must be image/* or application/octet-stream for one image, or multipart/form-data"
                f" for several; got {printable(kind)[:80]}. With curl --data-binary, add -H 'Content-Type:"
                " image/jpeg'.",
            )
        return parse_form(body, request.headers["content-type"], self.settings.max_images)


def create_app(settings: Settings, predictor: Predictor | None = None) -> FastAPI:
    """Return the application, for any ASGI server.

    Args:
        settings: of the service.
        predictor: the model; None to load `settings.run`.

    Raises:
        UsageError, CheckpointError: as in `Predictor.open`.
    """
    service = Service(settings, predictor)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    # FastAPI's own documentation pages are off: they load scripts from other servers
    app = FastAPI(title="weft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Guard, settings=settings, on_response=service.on_response)  # type: ignore[arg-type]
    if settings.proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.proxies))  # type: ignore[arg-type]
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameter)

    @app.post("/predict", response_model=Prediction, responses=ERRORS, openapi_extra={"requestBody": BODY})
    async def predict(
        request: Request,
        top_k: Annotated[int, Query(ge=1, le=1000, description="number of classes per image")] = 5,
        overlay: Annotated[bool, Query(description="also return attention maps")] = False,
    ) -> Response:
        """Classify one image (the body) or several images (a form)."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        if service.is_draining:
            await discard_body(request)
            text = "The service is stopping; send the request to another one."
            raise RequestError(503, "stopping", text, RETRY_LATER | CLOSE)
        async with service.body_reader.body(request) as body:
            uploads = service.uploads(request, body)
            predictor, results = await _unless_disconnected(request, service.predict(uploads, overlay))
        if len(results) == 1 and isinstance(results[0], BadImage):
            reason = results[0].reason
            raise RequestError(STATUS_OF_REASON.get(reason, 400), reason, str(results[0]))
        answers = [
            _image_json(predictor, upload.name, result, top_k, settings.reject_at_error)
            for upload, result in zip(uploads, results, strict=True)
        ]
        return Json({"answers": answers, "milliseconds": round(1000 * (loop.time() - begun), 2)})

    @app.get("/model", response_model=dict[str, Any])
    async def model() -> Response:
        """Describe the model: its name, classes, input and runtime; and the limits of the service."""
        limits = {name: getattr(settings, name) for name in ("max_bytes", "max_pixels", "max_images", "timeout")}
        return Json(
            {
                "name": Path(settings.run).absolute().name,
                **service.predictor.metadata,
                "limits": {**limits, "max_batch": service.max_batch},
                "version": __version__,
            }
        )

    @app.get("/live")
    async def live() -> dict[str, str]:
        """Health check: the process is running."""
        return {"status": "live"}

    @app.get("/ready", responses={503: {"description": "The service is stopping or overloaded"}})
    @app.get("/health", responses={503: {"description": "The service is stopping or overloaded"}})
    async def ready() -> Response:
        """Readiness check: the service accepts new images."""
        status = "ready" if service.is_ready else "stopping" if service.is_draining else "busy"
        return Json({"status": status, "waiting": service.batcher.pending}, 200 if status == "ready" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(_page_file("index.html"), media_type="text/html")

    @app.get("/page/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in PAGE_FILES:
            raise HTTPException(404)
        return Response(_page_file(name), media_type=PAGE_FILES[name])

    return app


def load_predictor(settings: Settings) -> Predictor:
    """Load the model of a service and warm it up, with the threads of the settings."""
    if settings.threads is not None:
        set_num_threads(settings.threads)
    predictor = Predictor.open(
        settings.run,
        runtime=settings.runtime,
        device=settings.device,
        precision=settings.precision,
        batch_size=settings.max_batch or BATCH_SIZES[-1],
        log=log,
    )
    if settings.reject_at_error is not None:
        predictor.reject_at(settings.reject_at_error)  # fails before the service is ready
    return predictor


@contextlib.asynccontextmanager
async def _no_other_worker_reloads() -> AsyncIterator[None]:
    """Wait until no other process of the service reloads.

    The first one measures the runtimes of a new model and stores its choice, so that the others make the same.
    """
    if MULTIPROC_DIR not in os.environ:
        yield
        return
    with open(Path(os.environ[MULTIPROC_DIR]) / "reload.lock", "ab") as file:
        while not lock_file(file.fileno()):
            await asyncio.sleep(0.1)
        yield


def _loaded(settings: Settings, predictor: Predictor | None = None) -> tuple[Predictor, int]:
    """Return a predictor, which is loaded unless it is given, and the limit of its batches."""
    predictor = predictor or load_predictor(settings)
    return predictor, _max_batch(settings, predictor)


def _max_batch(settings: Settings, predictor: Predictor) -> int:
    if settings.max_batch is not None and settings.max_latency_ms is None:
        return settings.max_batch
    blank = predictor.preprocessing.pixels(Image.new("RGB", (1, 1)))

    def seconds(size: int) -> float:
        begun = time.perf_counter()
        predictor.predict([blank] * size)
        return time.perf_counter() - begun

    return batch_limit(
        seconds,
        settings.max_batch or MAX_BATCH,
        max_seconds=None if settings.max_latency_ms is None else settings.max_latency_ms / 2000,
        min_gain=MIN_GAIN if settings.max_batch is None else None,
    )


def log(text: str) -> None:
    """Write one line to stderr."""
    print(f"weft: {one_line(text)}", file=sys.stderr, flush=True)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine; cancel it if the client disconnects.

    Raises:
        ClientDisconnect: the client has closed the connection.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _image_json(
    predictor: Predictor, name: str, result: ImagePrediction | BadImage, top_k: int, reject_at: float | None
) -> dict[str, Any]:
    """Return the JSON object of one image, with the fields of `Answer`."""
    if isinstance(result, BadImage):
        return {"image": name, "error": {"code": result.reason, "message": str(result)}}
    top = [{"class": label, "probability": share} for label, share in result.top(predictor.classes, top_k)]
    fields: dict[str, Any] = {"image": name, "top": top}
    if reject_at is not None:
        fields["rejected"] = top[0]["probability"] < predictor.reject_at(reject_at).threshold
    if result.unknown is not None:
        fields["unknown"] = result.unknown
    if result.overlay is not None:
        grid = result.overlay.grid.astype(float).round(3)  # float64: a rounded float32 has sixteen digits in JSON
        fields["overlay"] = {"grid": grid.tolist(), "region": list(result.overlay.region)}
    return fields


@functools.cache
def _page_file(name: str) -> bytes:
    return (resources.files("weft.serve") / "page" / name).read_bytes()


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.state.request_id)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {
        404: ("not-found", "This path does not exist; see /openapi.json."),
        405: ("method", "This path does not support this HTTP method; see /openapi.json."),
    }
    code, text = known.get(error.status_code, ("http", str(error.detail)))
    return error_response(
        RequestError(error.status_code, code, text, dict(error.headers or {})), request.state.request_id
    )


async def _on_invalid_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    texts = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
    return error_response(RequestError(422, "parameter", f"{'; '.join(texts)}."), request.state.request_id)
