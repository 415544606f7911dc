# A node of exo-mesh in a container:
#
#   docker build -t exo-mesh .                                    computes on the CPU, with MLX
#   docker build -t exo-mesh --build-arg ACCELERATOR=cuda .       computes on NVIDIA GPUs, with PyTorch
#
# docs/start/installation.md says how to run it.

ARG BASE=docker.io/library/python:3.13-slim-bookworm

FROM ${BASE} AS build
ARG ACCELERATOR=cpu
# instead of what ACCELERATOR says: engines to install, such as mlx,torch
ARG EXTRAS=
# a package index of your own, for this build only
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY exo_mesh ./exo_mesh
COPY engines ./engines
RUN case "$ACCELERATOR" in \
        cpu) extras=mlx ;; \
        cuda) extras=torch ;; \
        *) echo "ACCELERATOR=$ACCELERATOR: it is cpu or cuda" >&2; exit 1 ;; \
    esac \
    && python3 -m venv /opt/exo-mesh \
    && /opt/exo-mesh/bin/python -m pip install --no-cache-dir --disable-pip-version-check ".[${EXTRAS:-$extras}]" \
    && /opt/exo-mesh/bin/exo-mesh --version

FROM ${BASE}
RUN groupadd --gid 10001 exo-mesh \
    && useradd --no-log-init --uid 10001 --gid exo-mesh --create-home --home-dir /var/lib/exo-mesh --shell /usr/sbin/nologin exo-mesh
COPY --from=build /opt/exo-mesh /opt/exo-mesh
ENV PATH=/opt/exo-mesh/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    EXO_MESH_HOME=/var/lib/exo-mesh \
    EXO_MESH_LOG_FORMAT=json \
    HF_HOME=/var/lib/exo-mesh/huggingface
USER 10001:10001
WORKDIR /var/lib/exo-mesh
# the node's identity, its models and its settings (config.toml)
VOLUME /var/lib/exo-mesh
# API and page, peers, discovery
EXPOSE 52415 5000 5000/udp 5678/udp
# No init is needed: as process 1 `exo-mesh serve` waits for orphans and passes signals on to the node, which lets streams
# finish for --stop-grace (30 s) after SIGTERM.
# `docker stop --time 45` waits for that; compose.yaml has it as stop_grace_period.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import http.client as h, os; c = h.HTTPConnection('127.0.0.1', int(os.environ.get('EXO_MESH_API_PORT') or 52415), timeout=4); c.request('GET', '/healthz'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["exo-mesh"]
CMD ["serve"]
