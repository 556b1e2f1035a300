"""The HTTP application: routes, schemas and errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from importlib import resources
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from weft.data import BadImage
from weft.data.images.crop import Pixels
from weft.serve.batching import Batcher, Full
from weft.serve.decoding import Decoders
from weft.serve.forms import Sent, files_of
from weft.serve.guard import AGAIN, Guard, Intake, Refusal, refused
from weft.serve.metrics import Metrics
from weft.serve.predictor import ModelFault, Predictor, Verdict
from weft.serve.settings import Settings
from weft.text import one_line, printable
from weft.version import __version__

T = TypeVar("T")
PAGE = {"app.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
PATHS = ("/", "/predict", "/model", "/health", "/live", "/ready", "/metrics")
STATUS = {
    "not-an-image": 415,
    "too-many-pixels": 422,
    "too-thin": 422,
    "too-complex": 422,
    "compression": 415,
    "metadata-bomb": 422,
    "out-of-memory": 422,
    "too-slow": 422,
    "crashed": 422,
}  # of a picture that cannot be used; the rest is 400


class Class(BaseModel):
    """A class and its probability."""

    name: str = Field(alias="class")
    probability: float = Field(ge=0, le=1)


class Look(BaseModel):
    """Where the model looked: rows from top to bottom, from 0 to 1, over a region of the picture."""

    grid: list[list[float]]
    region: list[float] = Field(description="left, top, width, height; as shares of the picture's sides")


class Fault(BaseModel):
    """Why there is no answer."""

    code: str
    message: str
    request_id: str | None = None


class Answer(BaseModel):
    """What is on one picture, or why that cannot be told."""

    image: str
    top: list[Class] | None = None
    overlay: Look | None = None
    error: Fault | None = None


class Prediction(BaseModel):
    """The answers, in the order of the pictures."""

    answers: list[Answer]
    milliseconds: float


class Problem(BaseModel):
    """An error."""

    error: Fault


BODY = {
    "required": True,
    "content": {
        "image/*": {"schema": {"type": "string", "format": "binary"}},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["image"],
                "properties": {
                    "image": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
                },
            }
        },
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "A body that is no request, or a picture that cannot be used"},
    401: {"model": Problem, "description": "The token is missing or wrong"},
    403: {"model": Problem, "description": "Asked by a page of another site"},
    408: {"model": Problem, "description": "The body came too slowly"},
    413: {"model": Problem, "description": "The body is too long, or has too many pictures"},
    415: {"model": Problem, "description": "Not a picture"},
    421: {"model": Problem, "description": "The Host header is not a name of this service"},
    422: {"model": Problem, "description": "A parameter that does not fit, or a picture with too many pixels"},
    429: {"model": Problem, "description": "Too many pictures wait; Retry-After says for how long"},
    503: {"model": Problem, "description": "The service stops, or the model does not answer"},
    504: {"model": Problem, "description": "The answer took too long"},
}


class Service:
    """The state behind the routes.

    Args:
        settings: of the service.
        predictor: the model; None to open what the settings say.

    Attributes:
        is_draining: it stops: no new pictures are taken.
    """

    def __init__(self, settings: Settings, predictor: Predictor | None = None) -> None:
        self.settings = settings
        self.predictor = predictor or opened(settings)
        self.metrics = Metrics(PATHS, str(self.predictor.facts["runtime"]), str(self.predictor.facts["precision"]))
        self.intake = Intake(settings)
        self.decoders = Decoders(
            settings.decoder_count, settings.decode_timeout, settings.max_pixels, settings.decoder_memory
        )
        self.is_draining = False
        self.batcher: Batcher
        self._reloading: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the service answers; SIGHUP loads the model anew."""
        settings = self.settings
        self.batcher = Batcher(
            settings.max_batch, settings.max_wait_ms / 1000, settings.max_queue, self.metrics.on_batch
        )
        self.metrics.waiting.set_function(lambda: self.batcher.waiting)
        self.batcher.start()
        await self.decoders.start()
        loop = asyncio.get_running_loop()
        # a copy under Ray is not in the main thread, which alone gets signals; Windows has no SIGHUP
        is_told = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGHUP")
        if is_told:
            loop.add_signal_handler(signal.SIGHUP, self.begin_reload)
        try:
            yield
        finally:
            if is_told:
                loop.remove_signal_handler(signal.SIGHUP)
            await self.batcher.close()
            self.decoders.close()

    def begin_reload(self) -> None:
        """Loads the model anew, beside the work; requests that came before are answered by the old one."""
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        try:
            self.predictor = await asyncio.to_thread(opened, self.settings)
        except Exception as error:
            self.metrics.reloads.labels("failed").inc()
            say(f"the model was not loaded anew, the old one goes on: {error}")
            return
        self.metrics.reloads.labels("done").inc()
        say("the model was loaded anew.")

    def on_answer(self, method: str, path: str, status: int, seconds: float, request_id: str) -> None:
        """Counts an answer, and logs it where that is wanted."""
        self.metrics.on_answer(method, path, status, seconds)
        if self.settings.log:
            say(f"{status} {method} {printable(path)} {1000 * seconds:.1f} ms {request_id}")

    @property
    def is_ready(self) -> bool:
        """Whether new pictures would be taken."""
        is_full = self.batcher.taken >= self.settings.max_queue
        return not (self.is_draining or is_full or self.decoders.is_stuck) and self.batcher.is_working

    async def answers(self, sent: Sequence[Sent], overlay: bool) -> tuple[Predictor, list[Verdict | BadImage]]:
        """Decodes and asks the model; a picture that cannot be used has its reason for an answer.

        Raises:
            Refusal: too many wait, it took too long, or the model is at fault.
        """
        predictor = self.predictor
        try:
            async with asyncio.timeout(self.settings.timeout):
                with self.batcher.preparing(len(sent)):
                    prepared = await asyncio.gather(*(self.decoders.pixels(item.data, predictor.crop) for item in sent))
                good = [item for item in prepared if isinstance(item, Pixels)]
                verdicts = iter(await self.batcher.answers(good, predictor, overlay)) if good else iter(())
        except Full as full:
            self.metrics.images.labels("queue-full").inc(len(sent))
            later = {"retry-after": str(max(round(full.seconds), 1))}
            raise Refusal(429, "queue-full", "Too many pictures wait; try again later.", later) from None
        except TimeoutError:
            self.metrics.images.labels("too-late").inc(len(sent))
            text = f"The answer took longer than {self.settings.timeout:g} seconds."
            raise Refusal(504, "too-late", text, AGAIN) from None
        except ModelFault as fault:
            raise Refusal(503, "model-fault", str(fault), AGAIN) from None
        for item in prepared:
            if isinstance(item, BadImage):
                self.metrics.images.labels(item.reason).inc()
        return predictor, [item if isinstance(item, BadImage) else next(verdicts) for item in prepared]

    def sent(self, request: Request, data: bytearray) -> list[Sent]:
        """The pictures of a body.

        Raises:
            Refusal: it is neither a picture nor a form of pictures.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in ("", "application/octet-stream") or kind.startswith("image/"):
            return [Sent("image", data)]
        if kind != "multipart/form-data":
            raise Refusal(
                415,
                "content-type",
                "A picture is sent as image/* or application/octet-stream, several as multipart/form-data; this came"
                f" as {printable(kind)[:80]}. With curl --data-binary, add -H 'Content-Type: image/jpeg'.",
            )
        return files_of(data, request.headers["content-type"], self.settings.max_images)


def create_app(settings: Settings, predictor: Predictor | None = None) -> FastAPI:
    """The application, for any ASGI server.

    Args:
        settings: of the service.
        predictor: the model; None to open what the settings say.

    Raises:
        UsageError, CheckpointError: as `Predictor.open`.
    """
    service = Service(settings, predictor)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    # no pages of FastAPI: they fetch their scripts from elsewhere
    app = FastAPI(title="weft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Guard, settings=settings, on_answer=service.on_answer)  # type: ignore[arg-type]
    if settings.proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.proxies))  # type: ignore[arg-type]
    app.add_exception_handler(Refusal, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_parameter)

    @app.post("/predict", response_model=Prediction, responses=ERRORS, openapi_extra={"requestBody": BODY})
    async def predict(
        request: Request,
        top_k: Annotated[int, Query(ge=1, le=1000, description="classes per picture")] = 5,
        overlay: Annotated[bool, Query(description="also where the model looked")] = False,
    ) -> Response:
        """What is on one picture (the body) or several (a form)."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        if service.is_draining:
            raise Refusal(503, "stopping", "The service stops; ask another one.", {**AGAIN, "connection": "close"})
        async with service.intake.body(request) as data:
            pictures = service.sent(request, data)
            predictor, found = await _unless_gone(request, service.answers(pictures, overlay))
        if len(found) == 1 and isinstance(found[0], BadImage):
            raise Refusal(STATUS.get(found[0].reason, 400), found[0].reason, str(found[0]))
        answers = [_answer(predictor, picture.name, item, top_k) for picture, item in zip(pictures, found, strict=True)]
        return JSONResponse({"answers": answers, "milliseconds": round(1000 * (loop.time() - begun), 2)})

    @app.get("/model")
    async def model() -> dict[str, Any]:
        """What answers: its classes, input and runtime, and the limits of the service."""
        limits = {name: getattr(settings, name) for name in ("max_bytes", "max_pixels", "max_images", "timeout")}
        return {**service.predictor.facts, "limits": limits, "version": __version__}

    @app.get("/live")
    async def live() -> dict[str, str]:
        """Whether the process runs."""
        return {"status": "live"}

    @app.get("/ready", responses={503: {"description": "It stops, or too much waits"}})
    @app.get("/health", responses={503: {"description": "It stops, or too much waits"}})
    async def ready() -> Response:
        """Whether new pictures would be taken."""
        word = "ready" if service.is_ready else "stopping" if service.is_draining else "busy"
        return JSONResponse({"status": word, "waiting": service.batcher.taken}, 200 if word == "ready" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(_asset("index.html"), media_type="text/html")

    @app.get("/page/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in PAGE:
            raise HTTPException(404)
        return Response(_asset(name), media_type=PAGE[name])

    return app


def opened(settings: Settings) -> Predictor:
    """The predictor that settings ask for."""
    return Predictor.open(
        settings.run,
        runtime=settings.runtime,
        device=settings.device,
        precision=settings.precision,
        warm=settings.max_batch,
        tell=say,
    )


def say(text: str) -> None:
    """One line for whoever runs the service."""
    print(f"weft: {one_line(text)}", file=sys.stderr, flush=True)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which ends where the client leaves: nobody would read it."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _answer(predictor: Predictor, name: str, found: Verdict | BadImage, top_k: int) -> dict[str, Any]:
    if isinstance(found, BadImage):
        return {"image": name, "error": {"code": found.reason, "message": str(found)}}
    top = [{"class": label, "probability": share} for label, share in found.top(predictor.names, top_k)]
    answer: dict[str, Any] = {"image": name, "top": top}
    if found.overlay is not None:
        grid = found.overlay.grid.astype(float).round(3)  # as float64, or JSON would have sixteen digits
        answer["overlay"] = {"grid": grid.tolist(), "region": list(found.overlay.region)}
    return answer


@functools.cache
def _asset(name: str) -> bytes:
    return (resources.files("weft.serve") / "page" / name).read_bytes()


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refused(error, request.state.request_id)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: ("not-found", "There is nothing here."), 405: ("method", "This cannot be asked in this way.")}
    code, text = words.get(error.status_code, ("http", str(error.detail)))
    return refused(Refusal(error.status_code, code, text, dict(error.headers or {})), request.state.request_id)


async def _on_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    texts = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
    return refused(Refusal(422, "parameter", f"{'; '.join(texts)}."), request.state.request_id)
