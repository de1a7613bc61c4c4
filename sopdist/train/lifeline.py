"""Ends the job when one of its ranks dies, instead of letting the others wait for it.

A thread of each rank looks several times a second whether the other ranks of its host still run. Between hosts one
rank of each host gives a sign of life through a store. Whoever finds a rank missing says so in one line, gives the main
thread a few seconds to fail by itself (a broken connection often does it), and ends its own process with the code LOST,
or, where somebody has interrupted this rank as well, with that of an interrupt.

Knows processes and hosts, nothing of training.
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

LOST = 70  # exit code of a rank that ended because another one was lost
LOOK_EVERY, BEAT_EVERY = 0.2, 3.0  # seconds; launchers look about once a second, and would end the job without a word
SILENCE = 30.0  # seconds without a sign of life after which a host is lost
GRACE = 5.0  # seconds for the main thread to fail by itself


@dataclass(frozen=True)
class Peer:
    """One of the ranks, as the others can find it."""

    rank: int
    host: str  # its name, for people
    machine: str  # what tells apart machines, and containers, whose process numbers are not shared
    pid: int
    born: str  # when the process began: a number alone may belong to another one later

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Lifeline:
    """The watching thread of one rank. Made by `start`."""

    def __init__(self, me: Peer, peers: Sequence[Peer], beats: Beats | None) -> None:
        self._me, self._beats = me, beats
        self._near = [peer for peer in peers if peer.machine == me.machine and peer.rank != me.rank]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        if len(peers) > 1:
            self._thread.start()

    def stop(self) -> None:
        """Before the last barrier of a run that ends well. Waits for nobody."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=GRACE)

    def _watch(self) -> None:
        next_beat = 0.0
        while not self._stopped.wait(LOOK_EVERY):
            dead = [peer for peer in self._near if not is_alive(peer)]
            if dead:
                news = _died(dead)
                lowest = not any(peer.rank < self._me.rank for peer in self._near if peer not in dead)
                self._end(news, tell=self._beats.claim(news) if self._beats else lowest)
            if self._beats is not None and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_EVERY
                news, mine = self._beats.exchange(speaker=all(self._me.rank < peer.rank for peer in self._near))
                if news and not self._stopped.is_set():
                    self._end(news, tell=mine)
        if self._beats is not None:
            self._beats.part()

    def _end(self, news: str, tell: bool) -> None:
        if tell and not was_interrupted():
            print(f"{news}: the job stops", file=sys.stderr, flush=True)
        time.sleep(GRACE)
        os._exit(INTERRUPTED if was_interrupted() else LOST)


class Beats:
    """Signs of life between machines, and the news that one is lost. One rank of each machine speaks for it."""

    def __init__(self, store: Any, me: Peer, peers: Sequence[Peer], silence: float) -> None:
        self._store, self._me, self._silence = store, me, silence
        self._others = [machine for machine in dict.fromkeys(peer.machine for peer in peers) if machine != me.machine]
        self._ranks = {machine: [peer for peer in peers if peer.machine == machine] for machine in self._others}
        self._keeper = peers[0]  # of the store
        self._reached = time.monotonic()
        self._heard = dict.fromkeys(self._others, (b"", self._reached))
        self._beat = 0

    def exchange(self, speaker: bool) -> tuple[str, bool]:
        """Say that this machine lives and hear about the others: what is lost, if any, and whether to tell it."""
        try:
            if self._store.check(["lost"]):
                return self._store.get("lost").decode(), False
            self._reached = time.monotonic()
            if not speaker:
                return "", False
            self._beat += 1
            self._store.set(f"beat/{self._me.machine}", str(self._beat))
            silent = [machine for machine in self._others if self._is_silent(machine)]
        except (RuntimeError, OSError):  # the store lives with rank 0 or its launcher
            lost = time.monotonic() - self._reached > self._silence
            return (f"{self._keeper} cannot be reached any more" if lost else ""), speaker
        if not silent:
            return "", False
        news = _died(self._ranks[silent[0]], how=f"gave no sign of life for {self._silence:.0f} s")
        return news, self.claim(news)

    def claim(self, news: str) -> bool:
        """Let all machines know; True for the first to do so, who tells it to people."""
        try:
            self._store.set("lost", news)
            return bool(self._store.add("told", 1) == 1)
        except (RuntimeError, OSError):
            return True

    def part(self) -> None:
        """The run ends well: silence from this machine means nothing from now on."""
        try:
            self._store.set(f"bye/{self._me.machine}", "1")
        except (RuntimeError, OSError):
            return

    def _is_silent(self, machine: str) -> bool:
        value, since = self._heard[machine]
        now = time.monotonic()
        if self._store.check([f"beat/{machine}"]):
            latest = self._store.get(f"beat/{machine}")
            if latest != value:
                self._heard[machine] = (latest, now)
                return False
        return now - since > self._silence and not self._store.check([f"bye/{machine}"])


def start(world: World) -> Lifeline:
    """Watch over the other ranks until `stop`. Collective. With one rank there is nothing to watch."""
    born = _born(os.getpid())
    told = world.gather_objects([socket.gethostname(), _machine(), os.getpid(), born])
    peers = [Peer(rank, *about) for rank, about in enumerate(told)]
    me = peers[world.rank]
    spread = any(peer.machine != me.machine for peer in peers)
    return Lifeline(me, peers, Beats(_own_connection(), me, peers, SILENCE) if spread else None)


def is_alive(peer: Peer) -> bool:
    """Whether a process of this machine still runs. One that has ended but was not yet buried does not."""
    try:
        os.kill(peer.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self/stat").exists() or (_state(peer.pid) not in "ZX" and _born(peer.pid) == peer.born)


def _died(dead: Sequence[Peer], how: str = "has died") -> str:
    names = " and ".join(str(peer) for peer in dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
    return f"{names} {how if len(dead) == 1 else how.replace('has', 'have')}"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may contain anything; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    return (_stat(pid) or ["X"])[0]


def _born(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""


def _machine() -> str:
    """The same text for all processes that see each other's numbers, and only for them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _own_connection() -> Any:
    """A connection to the ranks' store for this thread alone: theirs is blocked while the main thread waits on it."""
    store: Any = distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    own = distributed.TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=SILENCE))
    return distributed.PrefixStore("sopdist/lifeline", own)
