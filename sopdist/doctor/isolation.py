"""Run a probe in its own process, so that a package that crashes, hangs or prints cannot break the doctor.

A probe is a function without arguments that returns findings. Its process prints them as one line of JSON. Everything
that packages print goes to stderr; the last line of it is shown if the process fails. This file does not know the
probes.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict

from .finding import Finding

PREFIX = "sopdist-doctor:"  # of the line with the findings
_MAX_MESSAGE = 160  # characters of another package's error message
_SLOW = "run it again on an idle machine or with a larger --timeout; if that does not help, reinstall the package"
_CRASHED = "the package crashed its process: reinstall the version in requirements.lock"


def run_probe(module: str, function: str, deadline: float, *, what: str, needed: bool) -> list[Finding]:
    """Call `module.function` in a new process and return its findings. If the process fails, that is the finding.

    `deadline` is a time of time.monotonic(). `what` and `needed` describe the finding of a process that fails.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        return [Finding(what, "broken", "not run: the other probes used up the timeout", "a larger --timeout", needed)]
    # In its own session, so that the processes that the probe starts can be killed with it.
    child = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import print_findings; print_findings({module!r}, {function!r})"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return [Finding(what, "broken", f"no answer within {seconds:.0f} s", _SLOW, needed)]
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(PREFIX):
            return [Finding(**finding) for finding in json.loads(line[len(PREFIX) :])]
    return [Finding(what, "broken", _describe_failure(child.returncode, errors), _CRASHED, needed)]


def print_findings(module: str, function: str) -> None:
    """The child process of `run_probe`: run the probe, print its findings and exit."""
    output = os.dup(1)
    os.dup2(2, 1)  # some packages print to stdout when they are imported
    findings: list[Finding] = getattr(importlib.import_module(module), function)()
    os.write(output, (PREFIX + json.dumps([asdict(finding) for finding in findings]) + "\n").encode())
    os.close(output)
    sys.stdout.flush()
    os._exit(0)  # skip the exit handlers of packages: they are not under test


def shorten(message: str) -> str:
    """The first non-empty line of a message, truncated."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "no message")
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 3] + "..."


def _describe_failure(code: int, errors: bytes) -> str:
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {shorten(lines[-1])}" if lines else how
