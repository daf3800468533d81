#!/bin/sh
# tini's only child. For `run`, which is the default, it becomes the guardian, so the deadline is armed with nothing but
# an interpreter: the runner and its packages may be broken, and the server is stopped all the same.
set -u
runner=/opt/runner/bin

case "${1-}" in
  validate | status | logs | stop | checkpoints | simulate | -h | --help | --version)
    exec "$runner/vramfarm-runner" "$@"
    ;;
  run) shift ;;
esac

case " $* " in
  *" - "*) exec "$runner/vramfarm-runner" run "$@" ;; # reads standard input once, before the guardian
esac
exec "$runner/python" -I -m runner.guardian "$@"
