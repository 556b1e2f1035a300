"""State of the service that its routes share: model, decoders, queue and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future

from PIL import Image

from weft.data import BadImage
from weft.data.preprocessing import Pixels
from weft.deploy.formats import BATCH_SIZES
from weft.inference.predictor import ImagePrediction, Predictor
from weft.machine.memory import keep_memory
from weft.machine.processor import begin_in_thread, call_in_thread, set_num_threads
from weft.serve.batching import Batcher, ModelError, QueueFull, batch_limit
from weft.serve.decoding import DecoderPool, NoDecoderError
from weft.serve.forms import Upload
from weft.serve.guard import RETRY_LATER, BodyReader, RequestError
from weft.serve.metrics import Metrics
from weft.serve.settings import MAX_BATCH, Settings
from weft.text import one_line, printable

MIN_GAIN = 1.05  # of the throughput, for which a batch may have twice as many images and take twice as long


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
        self.predictor, self.max_batch = call_in_thread(lambda: _load(settings, predictor))
        self.metrics = Metrics()
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
            self.max_batch, settings.max_wait, settings.max_queue, metrics.on_batch, metrics.waiting.set
        )
        self.batcher.start()
        loop = asyncio.get_running_loop()
        # only the main thread receives signals, and a replica on Ray runs in another one; Windows has no SIGHUP
        has_signals = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGHUP")
        if has_signals:
            loop.add_signal_handler(signal.SIGHUP, self.begin_reload)
        try:
            await self.decoders.start()
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
            self._reloading = asyncio.get_running_loop().create_task(self._reload())

    @property
    def is_reloading(self) -> bool:
        """Whether a model is being loaded while the current one serves."""
        return self._reloading is not None and not self._reloading.done()

    @property
    def is_loading(self) -> bool:
        """Whether a thread loads a model, which also a service that has stopped cannot interrupt."""
        return self._loading is not None and not self._loading.done()

    async def _reload(self) -> None:
        while self._is_reload_due:
            self._is_reload_due = False
            self._loading = begin_in_thread(lambda: _load(self.settings, current=self))
            try:
                self.predictor, self.max_batch = await asyncio.wrap_future(self._loading)
            except Exception as error:
                self.metrics.reloads.labels("failed").inc()
                log(f"the model was not reloaded; the current model keeps serving: {error}")
                continue
            self.batcher.max_batch = self.max_batch
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


def load_predictor(settings: Settings) -> Predictor:
    """Load the model of a service, with the threads of the settings."""
    if settings.threads is not None:
        set_num_threads(settings.threads)
    predictor = Predictor.open(
        settings.run,
        runtime=settings.runtime,
        img_size=settings.img_size,
        device=settings.device,
        precision=settings.precision,
        batch_size=settings.max_batch or BATCH_SIZES[-1],
    )
    if settings.reject_at_error is not None:
        predictor.reject_at(settings.reject_at_error)  # fails before the service is ready
    return predictor


def _load(
    settings: Settings, predictor: Predictor | None = None, current: Service | None = None
) -> tuple[Predictor, int]:
    """Return a predictor, which is loaded unless it is given, and the limit of its batches."""
    if predictor is not None:
        return predictor, _max_batch(settings, predictor)
    predictor, keys = load_predictor(settings), ("architecture", "runtime", "precision", "input")
    if current is not None and all(
        predictor.metadata.get(key) == current.predictor.metadata.get(key) for key in keys
    ):  # they run alike; a measurement would share the cores with the requests that are answered meanwhile
        max_batch = current.max_batch
    else:
        max_batch = _max_batch(settings, predictor)
    predictor.warmed_up(max_batch)
    return predictor, max_batch


def _max_batch(settings: Settings, predictor: Predictor) -> int:
    if settings.max_batch is not None and settings.max_latency is None:
        return settings.max_batch
    predictor.model.compile_for(())  # for a fair measurement; the sizes of the traffic follow from it
    blank = predictor.preprocessing.pixels(Image.new("RGB", (1, 1)))

    def seconds(size: int) -> float:
        begun = time.perf_counter()
        predictor.predict([blank] * size)
        return time.perf_counter() - begun

    return batch_limit(
        seconds,
        settings.max_batch or MAX_BATCH,
        max_seconds=None if settings.max_latency is None else settings.max_latency / 2,
        min_gain=MIN_GAIN if settings.max_batch is None else None,
    )


def log(text: str) -> None:
    """Write one line to stderr."""
    print(f"weft: {one_line(text)}", file=sys.stderr, flush=True)
