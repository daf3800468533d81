"""
`launch`: a job on this machine's own Docker engine, in the same image that runs on rented servers,
with the flags that it needs. What `--dry-run` prints and what is started come from one plan.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from runner.adapters.secrets import OWN_STORE_KEYS, STORE_KEYS
from runner.addresses import local_path
from runner.cli.load import LoadedJob, load_job
from runner.cli.naming import JOB_VARIABLE, add_job, named_job
from runner.cli.output import out, out_json
from runner.cli.planned import refuse_planned
from runner.errors import JobError, LockedError, MachineError
from runner.job import Job, PathSource, ProviderName

IMAGE: Final = "vramfarm/runner"
_JOB_FOLDER: Final = "/job"
_WORKSPACE: Final = "/workspace"
_SOCKET: Final = "/var/run/docker.sock"
_STOP_TIMEOUT_S: Final = 120
_ULIMITS: Final = {"memlock": -1, "stack": 64 << 20, "nofile": 1 << 20}  # pinned memory, deep stacks, many shards
_STORE_KEYS: Final = (
    *STORE_KEYS,
    *OWN_STORE_KEYS,
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One container. `names` are variables whose values come from the environment here, and are shown nowhere."""

    name: str
    image: str
    arguments: tuple[str, ...]
    volumes: Mapping[str, str]  # what lies here or is named, to `/where:mode` there
    env: Mapping[str, str]
    names: tuple[str, ...]
    gpus: str  # "all", a number, or nothing
    shm_size: str
    network: str


def configure(parser: argparse.ArgumentParser) -> None:
    add_job(parser, default=f"; without it, ${JOB_VARIABLE}")
    parser.add_argument("--image", default=IMAGE, help=f"the runner's image, or one made FROM it (default: {IMAGE})")
    parser.add_argument("--name", help="name of the container and its volume (default: the job's)")
    parser.add_argument(
        "--gpus", default="auto", help="all, none, or a number; auto: as the job says, if there are any"
    )
    parser.add_argument("--shm-size", default="16g", help="size of /dev/shm, for cards and data workers (default: 16g)")
    parser.add_argument(
        "--network", default="host", help="a Docker network (default: host, the fastest for NCCL and uploads)"
    )
    parser.add_argument("--attach", action="store_true", help="show the log until the job ends; Ctrl-C lets it run on")
    parser.add_argument("--dry-run", action="store_true", help="print the docker run line and start nothing")
    parser.add_argument("--json", action="store_true", help="what was started, as JSON")


def run(args: argparse.Namespace) -> int:
    loaded = load_job(named_job(args), os.environ)
    refuse_planned(loaded.job)
    if args.dry_run:
        plan = make_plan(args, loaded, os.environ, has_gpus=args.gpus == "auto" and not loaded.job.cpu_processes)
        command = as_command(plan)
        out_json({"argv": list(command)}) if args.json else out(shlex.join(command))
        return 0
    with _engine() as engine:
        plan = make_plan(args, loaded, os.environ, has_gpus=_has_gpus(engine))
        container = _start(engine, plan)
        _tell(plan, container, as_json=args.json)
        return _follow(container) if args.attach else 0


# ----------------------------------------------------------------------------------- the plan


def make_plan(args: argparse.Namespace, loaded: LoadedJob, env: Mapping[str, str], *, has_gpus: bool) -> Plan:
    """What is started. `JobError` if something that the job needs cannot come along."""
    job, name = loaded.job, args.name or f"vramfarm-{loaded.job.name}"
    in_engine = job.provider.kind is ProviderName.DOCKER
    here = Path(loaded.path).is_file()
    arguments = ("--config", f"{_JOB_FOLDER}/{Path(loaded.path).name}") if here else ()
    text = {} if here else {JOB_VARIABLE: base64.b64encode(loaded.text.encode()).decode()}
    stop = {"RUNNER_STOP_TIMEOUT": str(_STOP_TIMEOUT_S)}
    return Plan(
        name=name,
        image=args.image,
        arguments=arguments,
        volumes=dict(_volumes(loaded, name, _socket(env) if in_engine else "", here=here)),
        env={**stop, **text, **({"RUNNER_CONTAINER": name} if in_engine else {})},
        names=_names(job, env),
        gpus=_gpus(args.gpus, job, has_gpus=has_gpus),
        shm_size=args.shm_size,
        network=args.network,
    )


def _socket(env: Mapping[str, str]) -> str:
    """The engine's, here; it must be a file that can be mounted."""
    scheme, _, path = (env.get("DOCKER_HOST") or f"unix://{_SOCKET}").partition("://")
    if scheme != "unix":
        raise JobError(
            "provider.kind: docker: the engine is reached over the network, and the container could not reach it",
            hint="launch on the engine's own machine, or say provider: {kind: none}",
        )
    return path


def _volumes(loaded: LoadedJob, name: str, socket: str, *, here: bool) -> Iterator[tuple[str, str]]:
    yield name, f"{_WORKSPACE}:rw"
    source, store = loaded.job.source, loaded.job.offload.to
    if isinstance(source, PathSource) and not Path(source.path).is_relative_to(loaded.folder):
        raise JobError(
            f"source.path: {source.path} lies outside of {loaded.folder}, which is what the container sees",
            hint="put job.yaml above the code, or use git or an archive",
        )
    if here or isinstance(source, PathSource):
        yield str(loaded.folder), f"{_JOB_FOLDER}:ro"
    if folder := local_path(store or ""):  # a folder of this machine outlives the volume
        yield str(folder), f"{folder}:rw"
    if socket:
        yield socket, f"{_SOCKET}:rw"


def _names(job: Job, env: Mapping[str, str]) -> tuple[str, ...]:
    wanted = (*job.secrets, *job.notify)
    if missing := [name for name in wanted if not env.get(name)]:
        raise JobError(
            f"secrets: no value for {', '.join(missing)} in the environment here",
            hint=f"export {missing[0]}=… and launch again",
        )
    store = (name for name in _STORE_KEYS if env.get(name) and name not in wanted)
    return tuple(dict.fromkeys((*wanted, *store)))


def _gpus(wish: str, job: Job, *, has_gpus: bool) -> str:
    if wish != "auto":
        return "" if wish == "none" else wish
    if not has_gpus and job.cpu_processes:
        return ""
    return str(job.cards)


def as_command(plan: Plan) -> list[str]:
    """The same as a line for a shell: `docker run` takes the values of `--env NAME` from that shell."""
    words = ["docker", "run", "--detach", "--name", plan.name]
    words += ["--gpus", plan.gpus] if plan.gpus else []
    words += ["--shm-size", plan.shm_size, "--network", plan.network, "--stop-timeout", str(_STOP_TIMEOUT_S)]
    words += [word for name, limit in _ULIMITS.items() for word in ("--ulimit", f"{name}={limit}")]
    words += [word for source, target in plan.volumes.items() for word in ("--volume", f"{source}:{target}")]
    words += [word for name, value in plan.env.items() for word in ("--env", f"{name}={value}")]
    words += [word for name in plan.names for word in ("--env", name)]
    words += ["--label", f"vramfarm.run={plan.name}"]
    return [*words, plan.image, *plan.arguments]


# --------------------------------------------------------------------------------- the engine


@contextlib.contextmanager
def _engine() -> Iterator[Any]:
    if find_spec("docker") is None:
        raise JobError("launch: expected the package docker, found none", hint="pip install 'vramfarm-runner[docker]'")
    import docker  # noqa: PLC0415  # an extra: not everybody has it
    import docker.errors  # noqa: PLC0415
    import requests  # noqa: PLC0415  # docker's own

    try:
        engine = docker.from_env(timeout=120)
    except docker.errors.DockerException as error:
        hint = "start it, or set DOCKER_HOST; docker version tries the same"
        raise MachineError(f"launch: no Docker engine answers: {error}", hint=hint) from error
    try:
        yield engine
    except docker.errors.ImageNotFound as error:
        hint = "docker build --tag NAME . in the runner's folder makes one; --image NAME names it"
        raise MachineError(f"launch: the engine has no such image: {error.explanation}", hint=hint) from error
    except (docker.errors.DockerException, requests.RequestException) as error:
        text = getattr(error, "explanation", None) or str(error)
        raise MachineError(
            f"launch: the engine refused: {text}", hint="--dry-run prints what was asked of it"
        ) from error
    finally:
        engine.close()


def _has_gpus(engine: Any) -> bool:  # noqa: ANN401  # the SDK is an extra
    info = engine.info()
    devices = [device.get("ID", "") for device in info.get("DiscoveredDevices") or ()]
    return "nvidia" in (info.get("Runtimes") or {}) or any("nvidia" in device for device in devices)


def _start(engine: Any, plan: Plan) -> Any:  # noqa: ANN401  # as above
    import docker.errors  # noqa: PLC0415  # as above

    _make_room(engine, plan.name)
    container = _create(engine, plan, _ULIMITS)
    try:
        container.start()
    except docker.errors.APIError as error:
        container.remove()
        if "rlimit" not in str(error):
            raise
        _say("warning: this engine may not raise limits (rootless?): started without memlock, stack and nofile")
        container = _create(engine, plan, {})
        container.start()
    return container


def _create(engine: Any, plan: Plan, limits: Mapping[str, int]) -> Any:  # noqa: ANN401  # as above
    import docker.types  # noqa: PLC0415  # as above

    cards = [docker.types.DeviceRequest(count=_count(plan.gpus), capabilities=[["gpu"]])] if plan.gpus else None
    host = engine.api.create_host_config(
        binds=[f"{source}:{target}" for source, target in plan.volumes.items()],
        device_requests=cards,
        network_mode=plan.network,
        shm_size=plan.shm_size,
        ulimits=[docker.types.Ulimit(name=name, soft=limit, hard=limit) for name, limit in limits.items()],
    )
    made = engine.api.create_container(
        plan.image,
        list(plan.arguments),
        name=plan.name,
        environment={**plan.env, **{name: os.environ[name] for name in plan.names}},
        host_config=host,
        labels={"vramfarm.run": plan.name},
        stop_timeout=_STOP_TIMEOUT_S,
        volumes=[target.rpartition(":")[0] for target in plan.volumes.values()],
    )
    return engine.containers.get(made["Id"])


def _count(gpus: str) -> int:
    """As the engine counts: -1 is all."""
    if gpus == "all":
        return -1
    if not gpus.isdecimal():
        raise JobError(f"--gpus: expected all, none, auto or a number, got {gpus!r}")
    return int(gpus)


def _make_room(engine: Any, name: str) -> None:  # noqa: ANN401  # as above
    """A container of this name that has ended is replaced, its volume stays; one that runs is not touched."""
    import docker.errors  # noqa: PLC0415  # as above

    with contextlib.suppress(docker.errors.NotFound):
        old = engine.containers.get(name)
        if old.status in {"running", "paused", "restarting"}:
            raise LockedError(
                f"launch: container {name} runs already",
                hint=f"docker logs --follow {name} looks in; docker stop {name} saves and leaves; --name gives another one",
            )
        if "vramfarm.run" not in old.labels:
            raise LockedError(
                f"launch: there is a container {name} that launch did not make", hint="--name gives another"
            )
        old.remove()


def _tell(plan: Plan, container: Any, *, as_json: bool) -> None:  # noqa: ANN401  # as above
    if as_json:
        out_json({"container": plan.name, "id": container.id, "image": plan.image, "volume": plan.name})
        return
    out(plan.name)
    for line in (
        f"docker logs --follow {plan.name}                    what it does",
        f"docker exec {plan.name} vramfarm-runner status      how far it is",
        f"docker exec {plan.name} vramfarm-runner stop        save and end the job",
        f"docker stop {plan.name}                             save and leave; the same launch goes on",
    ):
        _say(line)


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201  # stdout has the name only


def _follow(container: Any) -> int:  # noqa: ANN401  # as above
    """The log, until the container ends; its exit code. Ctrl-C ends only the looking."""
    for piece in container.logs(stream=True, follow=True):
        sys.stderr.buffer.write(piece)
        sys.stderr.buffer.flush()
    return int(container.wait()["StatusCode"])
