"""The HTTP application: routes, JSON schemas and error responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from weft.data import BadImage
from weft.inference.predictor import ImagePrediction, Predictor
from weft.serve.forms import Upload, parse_form
from weft.serve.guard import CLOSE, RETRY_LATER, Guard, RequestError
from weft.serve.schemas import BODY, ERRORS, Prediction
from weft.serve.service import Service
from weft.serve.settings import Settings
from weft.text import printable
from weft.version import __version__

T = TypeVar("T")
PAGE = Path(__file__).parent / "page"
PAGE_FILES = ("app.js", "style.css", "icon.svg")
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
            text = "The service is stopping; send the request to another one."
            raise RequestError(503, "stopping", text, RETRY_LATER | CLOSE)
        async with service.body_reader.body(request) as body:
            uploads = _uploads(request, body, settings.max_images)
            predictor, results = await _unless_disconnected(request, service.predict(uploads, overlay))
        if len(results) == 1 and isinstance(results[0], BadImage):
            reason = results[0].reason
            raise RequestError(STATUS_OF_REASON.get(reason, 400), reason, str(results[0]))
        answers = [
            _image_json(predictor, upload.name, result, top_k, settings.reject_at_error)
            for upload, result in zip(uploads, results, strict=True)
        ]
        return JSONResponse({"answers": answers, "milliseconds": round(1000 * (loop.time() - begun), 2)})

    @app.get("/model", response_model=dict[str, Any])
    async def model() -> Response:
        """Describe the model: its name, classes, input and runtime; and the limits of the service."""
        limits = {name: getattr(settings, name) for name in ("max_bytes", "max_pixels", "max_images", "timeout")}
        return JSONResponse(
            {
                "name": printable(Path(settings.run).absolute().name),
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
        return JSONResponse({"status": status, "waiting": service.batcher.pending}, 200 if status == "ready" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise HTTPException(404)
        return FileResponse(PAGE / name)

    return app


def _uploads(request: Request, body: bytearray, max_images: int) -> list[Upload]:
    """Return the images in the body of a request."""
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
    return parse_form(body, request.headers["content-type"], max_images)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine; cancel it and raise ClientDisconnect if the client disconnects."""
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
    """Return the JSON object of one image, with the fields of `ImageResult`."""
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


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Raise an error of a route for the guard, which writes all error responses."""
    assert isinstance(error, HTTPException)
    known = {
        404: ("not-found", "This path does not exist; see /openapi.json."),
        405: ("method", "This path does not support this HTTP method; see /openapi.json."),
    }
    code, text = known.get(error.status_code, ("http", str(error.detail)))
    raise RequestError(error.status_code, code, text, dict(error.headers or {}))


async def _on_invalid_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    texts = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
    raise RequestError(422, "parameter", f"{'; '.join(texts)}.")
