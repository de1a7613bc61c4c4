"""Stops the job when one of its ranks dies, instead of letting the others wait for it.

A thread of each rank checks several times a second whether the other ranks of its machine are still running. Between
machines, one rank of each machine sends heartbeats through a store. A rank that finds another one dead prints one line,
gives the main thread a few seconds to fail by itself (a broken connection often does that), and exits its own process
with the code LOST, or with INTERRUPTED if this rank was interrupted as well.

Handles processes and machines. Independent of training.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from .interrupts import INTERRUPTED, was_interrupted
from .world import World

LOST = 70  # exit code of a rank that exits because another one was lost
POLL_INTERVAL = 0.2  # seconds; launchers poll about once a second, and would kill the job without a message
HEARTBEAT_INTERVAL = 3.0  # seconds
HEARTBEAT_TIMEOUT = 30.0  # seconds without a heartbeat after which a machine counts as lost
GRACE = 5.0  # seconds for the main thread to fail by itself


@dataclass(frozen=True)
class Peer:
    """One of the ranks, as the others can find it."""

    rank: int
    host: str  # host name, for messages
    machine: str  # identifies a machine, or a container: processes that see each other's pids
    pid: int
    started: str  # start time of the process: its pid alone may be reused

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Watchdog:
    """The watching thread of one rank. Created by `start`."""

    def __init__(self, me: Peer, peers: Sequence[Peer], heartbeats: Heartbeats | None) -> None:
        self._me, self._heartbeats = me, heartbeats
        self._local = [peer for peer in peers if peer.machine == me.machine and peer.rank != me.rank]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if len(peers) > 1:
            self._thread.start()

    def stop(self) -> None:
        """Call before the last barrier of a run that ends normally. Does not wait for other ranks."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=GRACE)

    def _watch(self) -> None:
        next_beat = 0.0
        while not self._stopped.wait(POLL_INTERVAL):
            dead = [peer for peer in self._local if not is_alive(peer)]
            if dead:
                message = _describe(dead)
                lowest = not any(peer.rank < self._me.rank for peer in self._local if peer not in dead)
                self._exit(message, report=self._heartbeats.announce(message) if self._heartbeats else lowest)
            if self._heartbeats is not None and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_INTERVAL
                sender = all(self._me.rank < peer.rank for peer in self._local)
                message, mine = self._heartbeats.exchange(sender=sender)
                if message and not self._stopped.is_set():
                    self._exit(message, report=mine)
        if self._heartbeats is not None:
            self._heartbeats.sign_off()

    def _exit(self, message: str, report: bool) -> None:
        if report and not was_interrupted():
            print(f"{message}: stopping the job", file=sys.stderr, flush=True)
        time.sleep(GRACE)
        os._exit(INTERRUPTED if was_interrupted() else LOST)


class Heartbeats:
    """Heartbeats between machines, and the message that one is lost. One rank of each machine sends them."""

    def __init__(self, store: Any, me: Peer, peers: Sequence[Peer], timeout: float) -> None:
        self._store, self._me, self._timeout = store, me, timeout
        self._others = [machine for machine in dict.fromkeys(peer.machine for peer in peers) if machine != me.machine]
        self._ranks = {machine: [peer for peer in peers if peer.machine == machine] for machine in self._others}
        self._store_peer = peers[0]  # the rank that runs the store
        self._reached = time.monotonic()
        self._received = dict.fromkeys(self._others, (b"", self._reached))
        self._count = 0

    def exchange(self, sender: bool) -> tuple[str, bool]:
        """Send a heartbeat and check the others': a message if a machine is lost, and whether to print it here."""
        try:
            if self._store.check(["lost"]):
                return self._store.get("lost").decode(), False
            self._reached = time.monotonic()
            if not sender:
                return "", False
            self._count += 1
            self._store.set(f"beat/{self._me.machine}", str(self._count))
            silent = [machine for machine in self._others if self._is_silent(machine)]
        except (RuntimeError, OSError):  # the store runs in rank 0 or its launcher
            lost = time.monotonic() - self._reached > self._timeout
            return (f"{self._store_peer} can no longer be reached" if lost else ""), sender
        if not silent:
            return "", False
        message = _describe(self._ranks[silent[0]], how=f"sent no heartbeat for {self._timeout:.0f} s")
        return message, self.announce(message)

    def announce(self, message: str) -> bool:
        """Send the message to all machines; True for the first one to do so, which prints it."""
        try:
            self._store.set("lost", message)
            return bool(self._store.add("reported", 1) == 1)
        except (RuntimeError, OSError):
            return True

    def sign_off(self) -> None:
        """The run ends normally: missing heartbeats of this machine mean nothing from now on."""
        try:
            self._store.set(f"bye/{self._me.machine}", "1")
        except (RuntimeError, OSError):
            return

    def _is_silent(self, machine: str) -> bool:
        value, since = self._received[machine]
        now = time.monotonic()
        if self._store.check([f"beat/{machine}"]):
            latest = self._store.get(f"beat/{machine}")
            if latest != value:
                self._received[machine] = (latest, now)
                return False
        return now - since > self._timeout and not self._store.check([f"bye/{machine}"])


def start(world: World) -> Watchdog:
    """Watch the other ranks until `stop`. Collective. One rank alone starts no thread."""
    mine = [socket.gethostname(), _machine(), os.getpid(), _start_time(os.getpid())]
    peers = [Peer(rank, *fields) for rank, fields in enumerate(world.gather_objects(mine))]
    me = peers[world.rank]
    several_machines = any(peer.machine != me.machine for peer in peers)
    heartbeats = Heartbeats(_own_connection(), me, peers, HEARTBEAT_TIMEOUT) if several_machines else None
    return Watchdog(me, peers, heartbeats)


def is_alive(peer: Peer) -> bool:
    """Whether a process of this machine is still running. A zombie is not."""
    try:
        os.kill(peer.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    if not Path("/proc/self/stat").exists():
        return True
    return _state(peer.pid) not in "ZX" and _start_time(peer.pid) == peer.started


def _describe(dead: Sequence[Peer], how: str = "has died") -> str:
    names = " and ".join(str(peer) for peer in dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
    return f"{names} {how if len(dead) == 1 else how.replace('has', 'have')}"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command name, which may contain anything; empty without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    return (_stat(pid) or ["X"])[0]


def _start_time(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""


def _machine() -> str:
    """The same text for all processes that see each other's pids, and only for them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _own_connection() -> Any:
    """A connection to the ranks' store for this thread: the main thread's own is blocked while it waits."""
    store: Any = distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    own = distributed.TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=HEARTBEAT_TIMEOUT))
    return distributed.PrefixStore("sopdist/watchdog", own)
