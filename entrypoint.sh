#!/bin/bash
# tini's only child, and, as `vramfarm-runner`, the command inside the image.
#
#   run, or nothing    check the container, become the guardian; it arms the deadline first, then starts the runner
#   up                 the same in the background, once: for images whose entrypoint the provider replaced (SSH, Jupyter)
#   validate, status…  the other commands
#
# The guardian needs nothing but the interpreter: with the runner or its packages broken the server is stopped all the same.
set -u
python=/opt/runner/bin/python

say() { printf '%(%H:%M:%S)T container: %s\n' -1 "$*" >&2; }

# What the provider told PID 1 is missing in a session over SSH or Jupyter: take it from there. It is written nowhere,
# because keys are among it. What the session sets itself stays, but for PATH, which would lead to another Python.
adopt_environment() {
  local entry name
  grep -qsz '^VRAMFARM_WORKSPACE=' /proc/1/environ || return 0 # not of this image: with --pid=host it is the host's
  while IFS= read -r -d '' entry; do
    name=${entry%%=*}
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || continue
    [[ $name = PATH || -z ${!name+set} ]] && export "${entry?}"
  done 2>/dev/null </proc/1/environ
}

# ------------------------------------------------------------------------------ the checks

check_container() {
  check_nccl
  check_network
  check_folders
}

check_nccl() {
  local name interface found
  for name in NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME; do
    interface=${!name-}
    interface=${interface#=}
    [[ -n $interface && $interface != ^* ]] || continue
    found=
    for interface in ${interface//,/ }; do
      compgen -G "/sys/class/net/$interface*" >/dev/null && found=1
    done
    [ -n "$found" ] || {
      say "$name=${!name} names no network interface of this container ($(interfaces)): going on without it; take the -e $name away"
      unset "$name"
    }
  done
  [ "${NCCL_P2P_DISABLE-0}" != 1 ] || say "NCCL_P2P_DISABLE=1: the cards talk through the host's memory; take that -e away unless they hang without it"
}

interfaces() { (cd /sys/class/net && echo *); }

check_network() { # with --network none a host name leads nowhere, and gloo would look it up
  [ "$(interfaces)" = lo ] || return 0
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
  say "no network in this container (--network none): training on this machine works; a store must be a file:// folder, and a server cannot be stopped"
}

# Programs write into HOME and /tmp: with --read-only, or --user, they need another place.
check_folders() {
  local spare=$VRAMFARM_WORKSPACE/.vramfarm
  if ! is_writable "$VRAMFARM_WORKSPACE"; then
    say "$VRAMFARM_WORKSPACE cannot be written by user $(id -u): mount a volume there that this user may write (-v NAME:$VRAMFARM_WORKSPACE)"
    return
  fi
  is_writable "${TMPDIR:-/tmp}" || { export TMPDIR=$spare/tmp && mkdir -p "$TMPDIR" && say "/tmp cannot be written: TMPDIR is $TMPDIR"; }
  is_writable "${HOME:-/}" || { export HOME=$spare/home && mkdir -p "$HOME" && say "the home folder cannot be written: HOME is $HOME"; }
  id -un >/dev/null 2>&1 || export USER=${USER:-runner} LOGNAME=${LOGNAME:-runner} # torch asks for the name
}

is_writable() { [ -d "$1" ] && [ -w "$1" ]; } # -w knows of read-only file systems

# --------------------------------------------------------------------------------- the run

guard() { # becomes the guardian
  local word
  for word in "$@"; do
    case $word in # these are looked at once, before the guardian starts the runner perhaps more than once
      - | --config=- | --start-over | --go-on | -h | --help) exec "$python" -I -m runner run "$@" ;;
    esac
  done
  exec "$python" -I -m runner.guardian "$@"
}

be_the_only_one() { # holds descriptor 9, and the lock with it, as long as the guardian lives; where none can be made, goes on
  [ ! -e /proc/self/fd/9 ] || return 0 # `up` has it
  local lock=/run/runner/lock
  is_writable /run/runner || lock=/dev/shm/runner-$(hostname).lock
  { exec 9>>"$lock"; } 2>/dev/null || return 0
  flock --nonblock 9
}

run() {
  be_the_only_one || {
    say "a run goes on in this container already: vramfarm-runner status"
    exit 5
  }
  check_container
  guard "$@"
}

up() {
  local log=$VRAMFARM_WORKSPACE/.vramfarm/up.log
  be_the_only_one || {
    say "already up: vramfarm-runner status"
    exit 0
  }
  [ -r /proc/1/environ ] || say "user $(id -u) cannot read what the provider told PID 1: export VRAMFARM_*, RUNNER_JOB and the job's secrets first"
  mkdir -p "${log%/*}" && touch "$log" || exit 3
  setsid "$0" run "$@" </dev/null >>"$log" 2>&1 &
  say "up, as process $!: vramfarm-runner status, or tail -f $log"
}

adopt_environment
: "${VRAMFARM_WORKSPACE:=/workspace}"
export VRAMFARM_WORKSPACE
case ${1-} in
  up | run) "$@" ;;
  -h | --help | --version) exec "$python" -I -m runner "$@" ;;
  "" | -*) run "$@" ;;
  *) exec "$python" -I -m runner "$@" ;;
esac
