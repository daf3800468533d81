"""
The guardian: what `vramfarm-runner run` becomes. It arms the deadline before anything can
fail, keeps the runner alive, and alone asks the provider to stop the server.

Standard library and modules of ours that need nothing else, all of it imported at the start,
so that it works when the disk and the packages are gone. What it decides is in `policy.guard`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

if __package__ in {None, ""}:  # started by its path under -I: last, so that it shadows nothing
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from runner.adapters.notifiers import notify_all
from runner.adapters.providers import PROVIDERS, Answer, Keep, find_server, keyrings, with_each
from runner.adapters.providers.http import make_send
from runner.errors import JobError, LeftError, LimitError, LockedError, RunnerError
from runner.facts import Server, ServerState
from runner.lifeline import ALIVE
from runner.policy.guard import (
    MAX_DEATHS,
    Armed,
    Death,
    End,
    Listeners,
    Waits,
    arm,
    decide_restart,
    decide_wait,
    dump_armed,
    hold_until,
    is_due,
    names_run,
    parse_armed,
    parse_word,
    rearm,
)
from runner.storage.disk import Disk, write_durable
from runner.supervise.apart import Apart, Scribe, apart, wait_for_file
from runner.supervise.kills import count_kills
from runner.supervise.process import Process, be_subreaper, current, end_all, find, with_descendants
from vramfarm.protocol import Env

RUNNER: Final = (sys.executable, "-I", "-m", "runner", "loop")
LIFELINE: Final = "RUNNER_LIFELINE"  # number of the runner's end of the socketpair
NOTIFY: Final = "RUNNER_NOTIFY_URL"  # who is told before job.yaml has named others
HOLD: Final = "RUNNER_HOLD_S"  # overrides how long the server is held after an early end
ACCEPTED: Final = "RUNNER_ACCEPTED"  # run folder of the runner that died: its job goes on, whatever job.yaml says now
MARK: Final = "VRAMFARM_GUARDIAN"  # carried by whatever this guardian's runner starts

WAITS: Final = Waits()
UNEXPECTED: Final = RunnerError.exit_code
USAGE: Final = JobError.exit_code  # without a last word: said before there was a job, and it would be said again
LEFT: Final = LeftError.exit_code

LINE_LIMIT: Final = 1 << 16


class Guardian:
    """One life of the guardian. Single-threaded: it sleeps in one `select`, which signals and the runner end."""

    def __init__(self, args: Sequence[str], *, runner: Sequence[str], waits: Waits, env: Mapping[str, str]) -> None:
        self._command = (*runner, *args)
        self._waits = waits
        self._rings = keyrings(env)
        self._env = self._rings[0]
        self._workspace = Path(env.get("VRAMFARM_WORKSPACE") or "/workspace")
        self._send = make_send()
        self._listeners = tuple(filter(None, [env.get(NOTIFY, "")]))
        self._leaving = False
        self._own_pid = os.getpid()
        self._mark = f"{self._own_pid}-{current().started}"
        self._pid = 0
        self._accepted = ""  # run folder, once a runner of ours has accepted the job
        self._exit: int | None = None
        self._wake = _listen_for_signals(self._on_leave)
        self._arm(self._first_armed(find_server(self._env)))

    def run(self) -> int:
        """Guard the run to its end; returns the exit code. On a rented server only after that is gone, or SIGTERM."""
        try:
            end = self._watch()
        except Exception as error:  # noqa: BLE001  # a fault of ours must not leave a server on
            log(f"a fault of the guardian: {error!r}")
            end = End(code=UNEXPECTED, stop=not self._leaving, keep=self._armed.keep, reason="a fault of the guardian")
        server = self._armed.rented
        if server is None or (end.code == LockedError.exit_code and not end.stop):
            return end.code
        if not end.stop:
            end = self._stay(end)
        else:
            self._hold(end)
        if not self._leaving or self._is_due():  # SIGTERM stops no server, the deadline does
            self._stop_server(server, end)
        return end.code

    # ------------------------------------------------------------------------- deadline

    def _first_armed(self, found: Server | None) -> Armed:
        stored = self._read_armed()
        mine = rearm(stored, found, socket.gethostname()) if stored else None
        if mine is not None:
            log(f"deadline {_show(mine.deadline_at)}, armed at the first boot; {_name(mine.rented)}")
            return mine
        armed = arm(now=datetime.now(UTC), rented=found, keep=str(self._workspace))
        log(f"deadline {_show(armed.deadline_at)} unless job.yaml says another (limits); {_name(found)}")
        return armed

    def _read_armed(self) -> Armed | None:
        path = self._workspace / ".vramfarm" / "guardian.json"
        try:
            return parse_armed(apart(path.read_bytes, self._waits.disk))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log(f"{path}: expected the deadline of an earlier boot, got {error}; armed anew")
            return None

    def _arm(self, armed: Armed) -> None:
        self._armed = armed
        self._ends_mono = time.monotonic() + (armed.deadline_at - datetime.now(UTC)).total_seconds()
        if armed.server:
            self._write_armed(armed)

    def _write_armed(self, armed: Armed) -> None:
        folder = self._workspace / ".vramfarm"

        def write() -> bytes:
            folder.mkdir(parents=True, exist_ok=True)
            write_durable(Disk(), folder / "guardian.json", dump_armed(armed))
            return b""

        try:
            apart(write, self._waits.disk)
        except OSError as error:
            log(f"{folder}: cannot write the deadline ({error.strerror}); it is kept in memory only")

    def _is_due(self) -> bool:
        return is_due(self._armed.deadline_at, datetime.now(UTC), self._ends_mono, time.monotonic())

    # --------------------------------------------------------------------------- runner

    def _watch(self) -> End:
        """Keep a runner alive until it says its last word, a person ends us, or the deadline comes."""
        deaths: list[Death] = []
        while True:
            started, kills = time.monotonic(), count_kills().count
            end = self._live()
            if end is not None:
                return end
            if self._exit == USAGE:
                return End(code=USAGE, stop=True, keep=self._armed.keep, reason="the command line is not understood")
            deaths.append(Death(time.monotonic() - started, time.monotonic()))
            delay = decide_restart(deaths, self._waits)
            if delay is None:
                self._alert(f"the runner died {MAX_DEATHS} times without a minute of life; giving up")
                reason = f"the runner died {MAX_DEATHS} times"
                return End(code=UNEXPECTED, stop=True, keep=self._armed.keep, reason=reason)
            log(f"the runner died ({_show_exit(self._exit)}{_show_kills(kills)}); starting it again in {delay:g} s")
            self._pause(delay)
            if self._leaving:
                return End(code=LEFT, stop=False)

    def _live(self) -> End | None:
        """One life of the runner; None if it died without a last word."""
        if self._is_due():
            return self._end_at_deadline()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = self._start(theirs)
            if process is None:
                return None
            return self._follow(ours)

    def _start(self, theirs: socket.socket) -> subprocess.Popen[bytes] | None:
        self._pid, self._exit = 0, None
        env = {**self._env, LIFELINE: str(theirs.fileno()), MARK: self._mark, ACCEPTED: self._accepted}
        try:
            process = subprocess.Popen(self._command, env=env, pass_fds=(theirs.fileno(),))
        except OSError as error:
            log(f"cannot start the runner: {error}")
            return None
        self._pid = process.pid
        process.returncode = 0  # we reap it ourselves, with all other children
        return process

    def _follow(self, line: socket.socket) -> End | None:
        end: End | None = None
        words = _Words()
        ends_at = float("inf")
        passed_on = False
        self._heard_at, self._is_silent = time.monotonic(), False
        while self._exit is None:
            if self._is_due():
                return self._end_at_deadline()
            if self._leaving and not passed_on:
                passed_on, self._heard_at = True, time.monotonic()
                self._signal_runner(signal.SIGTERM)
            if time.monotonic() > ends_at:
                log(f"the runner did not end {self._waits.last_word:g} s after its last word; killing it")
                self._end_runner()
                break
            if self._is_stuck(end):
                return self._leave_it()
            self._sleep(self._waits.look, None if words.ended else line)
            end = self._hear(words.take(line)) or end
            if end is not None and ends_at == float("inf"):
                ends_at = time.monotonic() + self._waits.last_word
        end = self._hear(words.take(line)) or end
        if self._leaving:
            return End(code=end.code if end else _exit_code(self._exit), stop=False)
        return end

    def _is_stuck(self, end: End | None) -> bool:
        """Whether a runner that has to leave says nothing any more. In any other it is told: what trains goes on."""
        if end is not None:
            return False
        silent = time.monotonic() - self._heard_at
        if silent >= self._waits.unheard and not self._is_silent:
            self._is_silent = True
            self._alert(
                f"the runner says nothing for {silent:.0f} s: does its disk answer? Training may go on; nothing is copied and "
                "nothing restarted meanwhile"
            )
        return self._leaving and silent >= self._waits.silence

    def _leave_it(self) -> End:
        self._alert(
            f"the runner says nothing for {self._waits.silence:g} s, its disk may not answer: this boot ends without it; "
            "what was committed is there when the disk is"
        )
        self._end_run()
        return End(code=LEFT, stop=False)

    def _hear(self, lines: Iterator[bytes]) -> End | None:
        end: End | None = None
        for raw in lines:
            self._heard_at, self._is_silent = time.monotonic(), False
            if raw == ALIVE:
                continue
            try:
                heard = parse_word(raw, self._armed)
            except ValueError as error:
                log(f"a word of the runner is ignored: {error}")
                continue
            if isinstance(heard, Listeners):
                self._listeners = heard.urls
            elif isinstance(heard, End):
                end = heard
            else:
                self._accepted = names_run(raw) or self._accepted
                if heard != self._armed:
                    self._arm(self._told(heard))
        return end

    def _told(self, heard: Armed) -> Armed:
        """What the runner said, with a line about it."""
        if _name(heard.rented) != _name(self._armed.rented):
            log(f"{_name(heard.rented)}, by job.yaml")
        elif abs(heard.deadline_at - self._armed.deadline_at) >= timedelta(seconds=1):  # less is no news
            log(f"deadline {_show(heard.deadline_at)}, set by the runner")
        return heard

    def _end_at_deadline(self) -> End:
        self._alert(
            f"the deadline {_show(self._armed.deadline_at)} is here: ending the run; a later one in job.yaml (limits) lets it go on"
        )
        self._end_run()
        return End(code=LimitError.exit_code, stop=True, keep=self._armed.keep, reason="deadline")

    def _end_run(self) -> None:
        self._signal_runner(signal.SIGKILL)
        find_run, limit = self._find_run, self._waits.killed
        with suppress(OSError):  # whoever looks at a process that hangs may hang, too
            apart(lambda: b"%d" % len(end_all(find_run, timeout_s=limit)), 1.5 * limit)
        # the mark of one that hangs cannot be read: by who started whom, then
        if left := len(end_all(self._descendants, timeout_s=limit)):
            log(f"{left} of the processes of the run hang in the kernel")
        self._reap()

    def _end_runner(self) -> None:
        """Who hangs in the kernel is waited for no more."""
        self._signal_runner(signal.SIGKILL)
        ends = time.monotonic() + self._waits.killed
        while self._exit is None and time.monotonic() < ends:
            self._sleep(ends - time.monotonic())

    def _find_run(self) -> tuple[Process, ...]:
        """Whatever this guardian's runner started, and what carries the run's mark from an earlier life."""
        marked = find(Env.RUN, self._armed.run) if self._armed.run else ()
        ours = {*find(MARK, self._mark), *marked}
        return tuple(process for process in ours if process.pid != self._own_pid)

    def _descendants(self) -> tuple[Process, ...]:
        spared = {self._own_pid, *(scribe.pid for scribe in _scribe)}
        return tuple(process for process in with_descendants([current()]) if process.pid not in spared)

    def _signal_runner(self, number: int) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    # ----------------------------------------------------------------------------- stop

    def _stay(self, end: End) -> End:
        """Keep the server as the job asks, though not past the deadline; its folder is kept even then."""
        if not self._leaving:
            until, price = _show(self._armed.deadline_at), _price(self._armed.rented)
            log(
                f"the run ended with code {end.code}; the server stays, as the job asks, and is billed{price} "
                f"until the deadline {until}"
            )
        while not (self._leaving or self._is_due()):
            self._sleep(self._waits.look)
        return replace(end, keep=self._armed.keep)

    def _hold(self, end: End) -> None:
        until = hold_until(end, self._armed, datetime.now(UTC), self._env.get(HOLD, ""))
        left = until - datetime.now(UTC)
        if left <= timedelta(0):
            return
        stop_file = Path(self._armed.run or self._workspace / ".vramfarm") / "stop"
        reason = f" ({end.reason})" if end.reason else ""
        log(f"the run ended with code {end.code}{reason}; the server is held for a look until {_show(until)}")
        log(
            f"{left.total_seconds() / 60:.0f} min left{_price(self._armed.rented)}; touch {stop_file} to stop the server now"
        )
        ends_mono = time.monotonic() + left.total_seconds()
        told: Apart | None = None
        with suppress(OSError):  # no room for one more process: then the time is up when it is up
            told = Apart(lambda: wait_for_file(stop_file, lambda: time.sleep(self._waits.look)))
        while not self._leaving and (told is None or told.wait(0) is None):
            if is_due(until, datetime.now(UTC), ends_mono, time.monotonic()):
                break
            self._sleep(self._waits.look)
        if told:
            told.end()

    def _stop_server(self, server: Server, end: End) -> None:
        """Ask, read, ask again, until the provider says that the server is gone or SIGTERM ends us."""
        log(f"asking {server.provider} to stop {server.id}")
        teller = _Teller(self._waits.repeat_log)
        answer, tries, known = self._read(server), 0, False
        log(
            PROVIDERS[server.provider].explain(
                self._keep(end), replace(answer, keeping=answer.keeping or server.keeping)
            )
        )
        again_at, alert_at = time.monotonic() + self._waits.stopping, time.monotonic() + self._waits.alert
        while True:
            known = known or answer.state in {ServerState.RUNNING, ServerState.STOPPING}
            if known and answer.state is ServerState.GONE:
                log(f"{server.id} is gone: {answer.detail}{_cost(server, answer)}")
                return
            if time.monotonic() >= alert_at:
                alert_at = time.monotonic() + self._waits.alert_again
                self._alert(f"the stop is not confirmed, the server may be billed on{_price(server)}: {answer.detail}")
            if tries or answer.state is ServerState.STOPPING:
                teller.tell(_progress(server, answer))
                self._pause(decide_wait(answer.state, answer.retry_after_s, tries, self._waits))
                if self._leaving:
                    return
            if answer.state is ServerState.STOPPING and time.monotonic() < again_at:
                answer = self._read(server)
                if answer.state is ServerState.RUNNING:
                    log(f"{server.id} runs again ({answer.detail}): the stop was not carried out; asking again")
                continue
            again_at = time.monotonic() + self._waits.stopping
            answer = self._ask(server, end)
            tries += 1

    def _alert(self, text: str) -> None:
        """Tell a person. Beside us: nothing waits for it."""
        log(f"alert: {text}")
        server = self._armed.server or "this machine"
        message = {
            "event": "alert",
            "title": f"{server}: alert",
            "text": f"{server}: {text}",
            "server": self._armed.server,
            "run_dir": self._armed.run,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if self._listeners:
            threading.Thread(target=notify_all, args=(self._listeners, message), daemon=True).start()

    def _read(self, server: Server) -> Answer:
        provider = PROVIDERS[server.provider]
        return with_each(self._rings, lambda ring: _safely(lambda: provider.read(server, ring, self._send)))

    def _ask(self, server: Server, end: End) -> Answer:
        provider, keep = PROVIDERS[server.provider], self._keep(end)
        return with_each(
            self._rings, lambda ring: _safely(lambda: provider.stop(server, keep, end.code, ring, self._send))
        )

    def _keep(self, end: End) -> Keep:
        """At the deadline the server stops even if its folder cannot be saved."""
        limit = end.code == LimitError.exit_code and self._armed.stop_anyway
        return Keep(end.keep, stop_anyway=limit or self._is_due())

    # ---------------------------------------------------------------------------- sleep

    def _on_leave(self) -> None:
        if not self._leaving:
            log("asked to leave (SIGTERM or Ctrl-C): this boot ends")
        self._leaving = True

    def _pause(self, seconds: float) -> None:
        """Sleep for that long, but not past the deadline, and not when asked to leave."""
        left = self._ends_mono - time.monotonic()
        ends = time.monotonic() + (min(seconds, left) if left > 0 else seconds)
        while not self._leaving and time.monotonic() < ends:
            self._sleep(ends - time.monotonic())

    def _sleep(self, timeout_s: float, line: socket.socket | None = None) -> None:
        """Sleep until a signal, a word on `line`, or the time is over."""
        waiting = [self._wake] if line is None else [self._wake, line]
        ready, _, _ = select.select(waiting, [], [], max(0.0, timeout_s))
        if self._wake in ready:
            with suppress(BlockingIOError):
                self._wake.recv(4096)
        self._reap()

    def _reap(self) -> None:
        """Take the exit of every child, ours or adopted, so that none stays a zombie."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._pid, self._exit = 0, os.waitstatus_to_exitcode(status)


class _Words:
    """Lines that came over the lifeline; what is too long to be one of ours is dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self.ended = False  # the other end is closed: nothing more will come

    def take(self, line: socket.socket) -> Iterator[bytes]:
        """Lines that are there now. Never blocks."""
        while True:
            try:
                piece = line.recv(LINE_LIMIT, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            if not piece:
                self.ended = True
                return
            *lines, self._rest = (self._rest + piece).split(b"\n")
            self._rest = self._rest[-LINE_LIMIT:]
            yield from lines


class _Teller:
    """Says a thing once, and again only rarely."""

    def __init__(self, repeat_s: float) -> None:
        self._repeat_s = repeat_s
        self._told: dict[str, float] = {}

    def tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told.get(text, -self._repeat_s) >= self._repeat_s:
            self._told[text] = now
            log(text)


def _exit_code(exit_: int | None) -> int:
    """Our exit code for a runner that was asked to leave: killed or not, its training can be gone on with."""
    return exit_ if exit_ is not None and exit_ >= 0 else LEFT


def log(text: str) -> None:
    """One line to stderr. Never raises, never blocks: a reader that sleeps must not cost the deadline."""
    line = f"{time.strftime('%H:%M:%S')} guardian: {' '.join(text.split())[:1000]}\n".encode(errors="replace")
    with suppress(OSError, ValueError):
        if _scribe:
            _scribe[0].write(line)
        elif select.select([], [2], [], 0)[1]:
            os.write(2, line)


_scribe: list[Scribe] = []  # where the log is a file: its disk may not answer


def _log_is_file() -> bool:
    with suppress(OSError):
        return stat.S_ISREG(os.fstat(2).st_mode)
    return False


def _listen_for_signals(on_leave: Callable[[], None]) -> socket.socket:
    """Arrange that every signal ends a `select` on the returned socket."""
    wake, alarm = socket.socketpair()
    wake.settimeout(0)
    alarm.settimeout(0)
    alarm_fd = alarm.detach()  # lives as long as the process
    signal.set_wakeup_fd(alarm_fd, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: on_leave())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed laptop ends nothing; children inherit it
    return wake


def _safely(call: Callable[[], Answer]) -> Answer:
    """Providers do not raise; should one do, we know nothing, and go on asking."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  # as above
        return Answer(ServerState.UNKNOWN, f"a fault of the provider's module: {error!r}")


def _progress(server: Server, answer: Answer) -> str:
    if answer.state is ServerState.STOPPING:
        return f"{server.id}: {answer.detail}"
    return f"{server.id} is not stopped yet: {answer.detail}; asking again and again"


def _show(moment: datetime) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M %Z}"


def _show_exit(code: int | None) -> str:
    if code is None:
        return "not started"
    return f"signal {-code}" if code < 0 else f"exit {code}"


def _show_kills(before: int) -> str:
    """Why the kernel may have killed it."""
    kills = count_kills()
    return f"; {replace(kills, count=kills.count - before).describe()}" if kills.count > before else ""


def _price(server: Server | None) -> str:
    return f", {server.price_per_hour} {server.currency} an hour" if server and server.price_per_hour else ""


def _cost(server: Server, answer: Answer) -> str:
    return f", {answer.cost} {server.currency} in all" if answer.cost else ""


def _name(server: Server | None) -> str:
    return f"server {server.id} ({server.provider})" if server else "no rented server"


def main(argv: Sequence[str], *, runner: Sequence[str] = RUNNER, waits: Waits = WAITS) -> int:
    """Guard one run; returns its exit code."""
    if _log_is_file():
        with suppress(OSError):  # no room for one more process
            _scribe.append(Scribe(2))
    be_subreaper()  # strays of the runner come to us: they are reaped, and can be found
    code = Guardian(argv, runner=runner, waits=waits, env=os.environ).run()
    signal.set_wakeup_fd(-1)  # nobody sleeps any more, and its other end is gone
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # one that comes while Python ends must not become the exit code
    for scribe in _scribe:
        scribe.end(waits.disk)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
