# Build: the wheel, with its native library and stubs. Run: the service and its worker, as an ordinary user.
# The steps are the Makefile's own: a wheel of this folder with the extra `all`.

FROM python:3.11-slim-bookworm AS build
# The base image pins the release; security updates are wanted.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --no-install-recommends -y cmake g++ make \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md ./
COPY protos protos
COPY service service
COPY worker worker
COPY client client
ARG TORCH=torch==2.13.0
# Wheels of CPU-only torch; set it empty for the index's default, which brings CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/chairlift \
 && /opt/chairlift/bin/pip install --no-cache-dir "pip==26.3" \
 && /opt/chairlift/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} "${TORCH}" \
 && /opt/chairlift/bin/pip install --no-cache-dir ".[all]"

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home chairlift \
 && install -d -o chairlift -g chairlift /run/chairlift /models /var/cache/chairlift
COPY --from=build /opt/chairlift /opt/chairlift
ENV PATH=/opt/chairlift/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/chairlift
USER 10001
# The application beside mounts the same volume and connects to the socket; models are mounted read-only.
VOLUME ["/run/chairlift", "/models"]
# The start period covers `--start-timeout`, 600 s unless set.
HEALTHCHECK --interval=15s --timeout=5s --start-period=660s \
  CMD ["chairlift", "health", "--target", "unix:/run/chairlift/chairlift.sock", "--deadline", "3"]
# 30 s of drain and a little more: give the container as long to stop.
STOPSIGNAL SIGTERM
ENTRYPOINT ["chairlift-serve", "--listen", "unix:/run/chairlift/chairlift.sock"]
CMD ["--model", "demo"]
