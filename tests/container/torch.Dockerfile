# A base that has torch, as public ones have it: for the CPU, because that is all a test machine has.
ARG WHEELHOUSE_IMAGE=scratch
FROM ${WHEELHOUSE_IMAGE} AS wheelhouse
FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    set -eu; \
    where="${TORCH_INDEX:+--extra-index-url $TORCH_INDEX}"; for wheel in /wheelhouse/*.whl; do [ ! -e "$wheel" ] || where="--no-index --find-links /wheelhouse"; done; \
    PIP_ROOT_USER_ACTION=ignore pip install --no-cache-dir --disable-pip-version-check $where torch==2.13.0 numpy
