# The simulated VRAMfarm in a container of its own: it ends every process that names its server, and must not see the job's.
ARG WHEELHOUSE_IMAGE=scratch
FROM ${WHEELHOUSE_IMAGE} AS wheelhouse
FROM python:3.11-slim-bookworm
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    set -eu; \
    where=; for wheel in /wheelhouse/*.whl; do [ ! -e "$wheel" ] || where="--no-index --find-links /wheelhouse"; done; \
    PIP_ROOT_USER_ACTION=ignore pip install --no-cache-dir --disable-pip-version-check $where fastapi uvicorn
WORKDIR /src
