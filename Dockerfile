# Container image that serves a model with `weft serve`.
#
#   docker build -t weft .
#   docker run --rm -p 8000:8000 -v "$PWD/runs/photos:/model:ro" -e WEFT_TOKEN=... weft
#
# For a GPU: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 ..., docker run --gpus all ...
# Supported options: --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges. A limit on memory needs a
# lower limit on pixels, for example on two cores: docker run --memory 4g ... weft --max-pixels 12000000
FROM python:3.12-slim AS build
RUN python -m venv /venv
# install PyTorch without CUDA first (a tenth of the size); the next pip command then keeps it
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /venv/bin/pip install --no-cache-dir torch torchvision --index-url "$TORCH_INDEX"
COPY pyproject.toml README.md LICENSE /weft/
COPY src /weft/src
RUN /venv/bin/pip install --no-cache-dir "/weft[deploy,serve]"

FROM python:3.12-slim
COPY --from=build /venv /venv
RUN useradd --uid 10001 --no-create-home weft
USER 10001
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp MPLCONFIGDIR=/tmp HF_HUB_OFFLINE=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/live', timeout=2)"]
STOPSIGNAL SIGTERM
# exec form: weft itself receives SIGTERM and answers the accepted requests; allow 25 seconds (docker stop -t 25)
ENTRYPOINT ["weft", "serve", "/model", "--host", "0.0.0.0", "--port", "8000"]
CMD []
