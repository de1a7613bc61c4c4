"""`sopdist doctor`: a broken package is a line of the table and never stops the doctor."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sopdist.doctor import PROBES, format_findings
from sopdist.doctor.finding import Finding
from sopdist.doctor.isolation import run_probe
from sopdist.doctor.machine import find_stale_buffers
from sopdist.doctor.packages import _import_package

SECRET = "0123456789abcdef" * 4


def probe(what: str, seconds: float = 60) -> dict[str, Finding]:
    """Run one probe as the doctor does; its process inherits the environment that the test has set."""
    (entry,) = (entry for entry in PROBES if entry.what == what)
    module = f"sopdist.doctor.{entry.module}"
    found = run_probe(module, entry.function, time.monotonic() + seconds, what=what, needed=True)
    return {finding.what: finding for finding in found}


def break_package(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shadow a package with a broken one of the same name."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sopdist", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150)


def test_this_machine_can_train_and_every_probe_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    result = doctor("--json", "--timeout", "120")
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(result.stdout)
    assert content["usable"] is True
    found = {finding["what"]: finding for finding in content["findings"]}
    for what in ("python", "torch", "accelerate", "two processes", "images and configs"):
        assert (found[what]["state"], found[what]["needed"]) == ("ok", True), found[what]
    import torch

    assert found["torch"]["detail"] == torch.__version__
    assert content["device"] == ("GPU" if torch.cuda.is_available() else "CPU")
    lines = {"DeepSpeed", "Triton", "DALI", "timm", "torchvision", "W&B", "disk", "caches", "shared memory"}
    assert found.keys() >= lines | {"CUDA", "C kernels, table", "C kernels, images", "open files", "CPU cores", "Slurm"}
    assert all(finding["advice"] for finding in content["findings"] if finding["state"] != "ok")


def test_without_torch_the_other_probes_still_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    break_package(tmp_path, "torch", "raise OSError('libtorch.so: cannot open shared object file')", monkeypatch)
    result = doctor()
    assert result.returncode == 1
    assert "libtorch.so: cannot open shared object file" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    assert "training cannot run here: see torch, two processes, accelerate" in result.stdout
    for what in ("Slurm", "open files", "disk"):
        assert f"\n{what} " in result.stdout


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('wrong\\nversion')", "ValueError: wrong"),
        ("import no_such_dependency", "needs no_such_dependency, which is not installed"),
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("raise SystemExit('goodbye')", "exit code 1: goodbye"),
        ("import time; time.sleep(600)", "no answer within"),
        ("print('x' * 100_000, flush=True); raise ValueError('chatty')", "ValueError: chatty"),
    ],
)
def test_a_broken_package_is_a_line_of_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, message: str
) -> None:
    break_package(tmp_path, "accelerate", code, monkeypatch)
    (finding,) = probe("accelerate", seconds=3 if "sleep" in code else 60).values()
    assert finding.state == "broken"
    assert message in finding.detail
    assert finding.advice
    assert finding.blocks_training


def test_the_children_of_a_hanging_package_are_killed_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    break_package(tmp_path / "packages", "wandb", code, monkeypatch)
    (finding,) = probe("W&B", seconds=5).values()
    assert "no answer" in finding.detail
    status = Path(f"/proc/{pid.read_text()}/stat")
    for _ in range(100):  # an orphan stays a zombie until its new parent waits for it
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    pytest.fail("the child of the probe is still running")


def test_packages_that_hang_leave_time_for_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("torch", "wandb", "triton"):
        break_package(tmp_path, name, "import time; time.sleep(600)", monkeypatch)
    result = doctor("--json", "--timeout", "6")
    assert result.returncode == 1
    found = {finding["what"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert "no answer within 3 s" in found["torch"]["detail"]
    assert found["W&B"]["state"] == found["Triton"]["state"] == "broken"
    for what in ("CPU cores", "disk", "open files", "Slurm"):
        assert "not run" not in found[what]["detail"]
        assert "no answer" not in found[what]["detail"]


def test_a_package_that_is_not_installed_is_missing_not_broken() -> None:
    module, finding = _import_package("no_such_package", "it", "install it", needed=True)
    assert module is None
    assert (finding.state, finding.detail, finding.advice) == ("missing", "not installed", "install it")
    assert finding.blocks_training


def test_without_a_compiler_the_cpu_operator_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    found = probe("DeepSpeed")
    assert found["DeepSpeed"].state == "ok"
    operator = found["DeepSpeed's CPU operator"]
    assert operator.state == "note"
    assert "no C++ compiler" in operator.detail
    assert "ninja" in operator.detail
    assert not (tmp_path / "extensions").exists(), "the probe must not create folders"


def test_a_home_that_cannot_be_written_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file, so that not even root can create folders in it")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    found = probe("disk")
    assert found["caches"].state == "broken"
    assert f"{tmp_path}/home/.cache cannot be written" in found["caches"].detail
    assert found["disk"].state in ("ok", "note")
    (wandb,) = probe("W&B").values()
    assert wandb.state in ("note", "ok")


def test_an_api_key_is_detected_and_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    for content, state in (
        ("", "note"),
        (f"machine example.org login user password {SECRET}\n", "note"),
        (f"machine api.wandb.ai\n  login user\n  password {SECRET}\n", "ok"),
    ):
        netrc.write_text(content)
        (finding,) = probe("W&B").values()
        assert finding.state == state
        assert SECRET not in str(finding)
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    (finding,) = probe("W&B").values()
    assert (finding.state, SECRET in str(finding)) == ("ok", False)


def test_only_unmapped_buffers_of_this_user_are_stale(tmp_path: Path) -> None:
    mine, other = os.getuid(), os.getuid() + 1
    dead = tmp_path / f"deepspeed_allreduce_buffer_{mine}_127.0.0.1_29500_0"
    alive = tmp_path / f"deepspeed_allreduce_buffer_{mine}_127.0.0.1_29500_1"
    for path in (dead, alive, tmp_path / f"deepspeed_allreduce_buffer_{other}_127.0.0.1_29500_0", tmp_path / "mine"):
        path.write_bytes(bytes(mmap.PAGESIZE))
    with alive.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert list(find_stale_buffers(tmp_path)) == [dead]
    assert list(find_stale_buffers(tmp_path)) == [dead, alive]


def test_ranks_that_cannot_communicate_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = probe("two processes").values()
    assert finding.state == "broken"
    assert "gloo" in finding.detail
    assert "GLOO_SOCKET_IFNAME" in finding.advice
    assert finding.blocks_training


def test_a_slurm_job_needs_srun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert probe("Slurm")["Slurm"].state == "note"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert probe("Slurm")["Slurm"].state == "broken"
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    finding = probe("Slurm")["Slurm"]
    assert (finding.state, finding.detail) == ("ok", "in job 17: tasks 8, nodes ?")


def test_few_open_files_and_too_many_threads_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))\n"
        "from sopdist.doctor.machine import probe_open_files; print(*probe_open_files())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "200 (hard limit 4,096)" in result.stdout
    assert "state='note'" in result.stdout
    monkeypatch.setenv("OMP_NUM_THREADS", str(10 * (os.cpu_count() or 1)))
    finding = probe("CPU cores")["CPU cores"]
    assert finding.state == "note"
    assert "OMP_NUM_THREADS=" in finding.detail


def test_the_columns_of_the_table_are_aligned() -> None:
    found = [
        Finding("torch", "ok", "2.13"),
        Finding("a thing with a long name", "broken", "no " * 40, "do this"),
        Finding("W&B", "note", "offline", "log in"),
    ]
    header, *lines = format_findings(found).splitlines()
    column = header.index("state")
    assert [line[column:].split()[0] for line in lines if not line.startswith(" ")] == ["ok", "broken", "note"]
    assert "W&B" in lines[-1]
    assert lines[-1].endswith("offline -> log in")
    assert lines[2].strip() == "-> do this", "the advice of a long line goes on the next line"


def test_each_probe_is_listed_once() -> None:
    assert len({(probe.module, probe.function) for probe in PROBES}) == len(PROBES)


def test_a_wrong_timeout_is_refused() -> None:
    result = doctor("--timeout", "soon")
    assert result.returncode == 2
    assert "'soon' is not a number of seconds" in result.stderr
