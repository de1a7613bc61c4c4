"""Run a probe in a process of its own: one that crashes, hangs or prints cannot take the doctor with it.

A probe is a function that returns findings. Its process answers with one line of JSON; what packages print goes to
stderr, of which only the last line is of interest, and only if the probe failed. This file knows no probe.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from .finding import Finding

MARK = "sopdist-doctor:"
_LONGEST = 160  # characters of a foreign message
_SLOW = "run it again on a quieter machine, or with a larger --timeout; if it stays so, reinstall the package"
_REINSTALL = "it took its whole process down: reinstall it in the version of requirements.lock"


def ask(module: str, probe: str, deadline: float, *, what: str, needed: bool) -> list[Finding]:
    """Start `python -m module probe` and return what it finds; a process that does not answer is a finding as well.

    `deadline` is on the clock of time.monotonic.
    """
    allowed = deadline - time.monotonic()
    if allowed <= 0:
        return [Finding(what, "broken", "not asked: others took all the time", "a larger --timeout", needed)]
    # A session of its own, so that whatever the probe has started can be ended with it.
    child = subprocess.Popen(
        [sys.executable, "-m", module, probe],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        answer, complaints = child.communicate(timeout=allowed)
    except subprocess.TimeoutExpired:
        return [Finding(what, "broken", f"no answer within {allowed:.0f} s", _SLOW, needed)]
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    for line in answer.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            return [Finding(**finding) for finding in json.loads(line[len(MARK) :])]
    return [Finding(what, "broken", _last_words(child.returncode, complaints), _REINSTALL, needed)]


def answer(arguments: Sequence[str], probes: dict[str, Callable[[], list[Finding]]]) -> None:
    """The other side of `ask`: run the probe that is named, and write down what it finds."""
    answers = os.dup(1)
    os.dup2(2, 1)  # packages greet on stdout
    (probe,) = arguments
    found = probes[probe]()
    os.write(answers, (MARK + json.dumps([asdict(finding) for finding in found]) + "\n").encode())
    os.close(answers)
    sys.stdout.flush()
    os._exit(0)  # what packages do at exit is not asked about


def short(message: str) -> str:
    """The first line of a message, cut to a bearable length."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "no message")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def _last_words(code: int, complaints: bytes) -> str:
    lines = [line.strip() for line in complaints.decode(errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {short(lines[-1])}" if lines else how
