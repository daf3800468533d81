# The training environment is the base image's own Python; the runner has a virtual environment beside it, which
# nothing that a job installs can touch.
#
#   docker build -t vramfarm/runner .
#   docker build --build-arg BASE=my/training-image -t my/runner .      any Debian or Ubuntu with Python 3.11 or newer
ARG BASE=pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime
# An image whose /wheels has what pip would download, for builds without a network.
ARG WHEELHOUSE_IMAGE=scratch
FROM ${WHEELHOUSE_IMAGE} AS wheelhouse

FROM ${BASE}
ARG PYTHON=python3
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates git tini tzdata \
 && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt README.md LICENSE /opt/src/
COPY runner /opt/src/runner
COPY vramfarm /opt/src/vramfarm
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    ${PYTHON} -c 'import sys; assert sys.version_info >= (3, 11), f"the base image needs Python 3.11, found {sys.version}"' \
 && ${PYTHON} -m venv /opt/runner \
 && PIP_FIND_LINKS=/wheelhouse/wheels /opt/runner/bin/python -m pip install --no-cache-dir --disable-pip-version-check \
      --constraint /opt/src/constraints.txt /opt/src \
 && rm -rf /opt/src \
 && /opt/runner/bin/vramfarm-runner --version
COPY --chmod=755 entrypoint.sh /opt/runner/entrypoint.sh
RUN mkdir -p /workspace
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "/opt/runner/entrypoint.sh"]
