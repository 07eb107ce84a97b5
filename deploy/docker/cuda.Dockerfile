# docker build -f deploy/docker/cuda.Dockerfile -t roseinfer:cuda .
# docker run --rm --gpus all --shm-size 1g -p 127.0.0.1:8000:8000 -v roseinfer-models:/models roseinfer:cuda MODEL [options]
# PyTorch brings CUDA's libraries; the machine has the driver, and the NVIDIA container toolkit hands it in.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
RUN python -m venv /opt/roseinfer
RUN /opt/roseinfer/bin/pip install --no-cache-dir 'torch>=2.11,<=2.13.0'
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY roseinfer /src/roseinfer
# With ray as well, for a cluster of KubeRay: --build-arg EXTRAS=cuda,otel,ray
ARG EXTRAS=cuda,otel
RUN /opt/roseinfer/bin/pip install --no-cache-dir "/src[${EXTRAS}]"

FROM python:${PYTHON}-slim
# Triton compiles what starts its kernels with a C compiler, when they first run.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/roseinfer /opt/roseinfer
RUN useradd --uid 10001 --no-create-home --home-dir /models roseinfer && install -d -o roseinfer -g roseinfer /models
ENV PATH=/opt/roseinfer/bin:$PATH HF_HOME=/models TRITON_CACHE_DIR=/models/triton PYTHONUNBUFFERED=1
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["roseinfer", "serve", "--host", "0.0.0.0", "--port", "8000"]
