# docker build -f deploy/docker/cpu.Dockerfile -t roseinfer:cpu --build-arg TORCH_INDEX=URL .
# docker run --rm -p 127.0.0.1:8000:8000 -v roseinfer-models:/models roseinfer:cpu [MODEL] [options of roseinfer serve]
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
# PyTorch's index of CPU builds, which its site names; without it pip's own, which has several gigabytes for GPUs.
ARG TORCH_INDEX
RUN python -m venv /opt/roseinfer
RUN /opt/roseinfer/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} 'torch>=2.11,<=2.13.0'
# The compiler builds the functions for CPUs. The image does not contain it.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY roseinfer /src/roseinfer
# With ray as well, for a cluster of KubeRay: --build-arg EXTRAS=otel,ray
ARG EXTRAS=otel
RUN /opt/roseinfer/bin/pip install --no-cache-dir "/src[${EXTRAS}]"

FROM python:${PYTHON}-slim
COPY --from=build /opt/roseinfer /opt/roseinfer
RUN useradd --uid 10001 --no-create-home --home-dir /models roseinfer && install -d -o roseinfer -g roseinfer /models
ENV PATH=/opt/roseinfer/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1
USER 10001:10001
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["roseinfer", "serve", "--host", "0.0.0.0", "--port", "8000"]
