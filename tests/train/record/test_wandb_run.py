"""W&B logging: it gets the metrics of the run and no secrets, and its failures never stop the run.

Each test starts a new process with an empty home, because W&B keeps state in the process and in the home.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sopdist.train.record.run_folder import METRICS, SUMMARY_JSON, WANDB_ID

KEY = "0123456789abcdef" * 2 + "01234567"  # valid in form, but not a real key
SECRETS = ("hunter2", "abc123", KEY)

# The run log of a short run. The argument `trouble` of `run` is code that is executed in the middle of it.
RUN = """
import logging, os, subprocess, signal, sys
from pathlib import Path
from sopdist.train.record.run_log import RunLog
from sopdist.train.settings import LogSettings
logging.basicConfig(format="warned: %(message)s")
config = {"run": {"seed": 7}, "data": {"root": "https://me:hunter2@host/a?sig=abc123"}, "lr": 0.5}
config["evaluate"] = {"splits": {"val": "pipe:curl -u me:hunter2 {}"}}
run_log = RunLog(Path("run"), LogSettings(**SETTINGS), config, 10, "first", class_names=["cat", "dog"])
run_log.rewind(START)
run_log.log("train", START + 5, 0, {"loss": 0.25, "accuracy": float("nan")})
TROUBLE
run_log.log("train", START + 10, 1, {"loss": 0.125, "accuracy": 0.75})
run_log.log("noise", START + 10, 1, {"rate": 0.4, "per_class": {"rate": [0.5, None], "samples": [3, 4]}})
run_log.finish({"steps": 10}, finished=True)
print("the run is over")
"""
TABLES = ["class", "rate", "samples"], [["cat", 0.5, 3], ["dog", None, 4]]


def run(
    folder: Path, environment: dict[str, str] | None = None, start: int = 0, trouble: str = "", **settings: Any
) -> subprocess.CompletedProcess[str]:
    (folder / "run").mkdir(exist_ok=True)
    (folder / "home").mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC", "XDG_"))}
    clean |= {"HOME": str(folder / "home"), "PYTHONPATH": str(Path(__file__).parents[3]), **(environment or {})}
    settings = {"wandb_timeout": 3.0, **settings}
    code = RUN.replace("SETTINGS", repr(settings)).replace("START", str(start)).replace("TROUBLE", trouble)
    command = [sys.executable, "-c", code, "data.root=https://me:hunter2@host/a"]
    result = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "the run is over" in result.stdout
    assert "Traceback" not in result.stderr
    assert json.loads((folder / "run" / SUMMARY_JSON).read_text())["finished"] is True
    assert [json.loads(line)["step"] for line in (folder / "run" / METRICS).read_text().splitlines()][-3:] == [
        start + 5, start + 10, start + 10,
    ]  # fmt: skip
    return result


def warnings_of(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What was printed to stderr besides the progress bar."""
    return [line for line in result.stderr.replace("\r", "\n").splitlines() if "warned" in line or "wandb" in line]


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "wandb").glob("offline-run-*/*.wandb"))


def records(path: Path, kind: str) -> list[Any]:
    """The records of this kind that W&B's own reader finds in the file of an offline run."""
    wandb = Path(sys.executable).parent / "wandb"
    command = [str(wandb), "leet", "inspect", "--json", str(path)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = [json.loads(line) for line in output.splitlines()]
    return [record[kind] for record in found if record["type"] == kind]


def assert_no_secret_in(folder: Path, result: subprocess.CompletedProcess[str]) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [secret for secret in SECRETS if secret.encode() in content], path
    assert not [secret for secret in SECRETS if secret in result.stdout + result.stderr]


def test_without_a_login_the_metrics_are_in_an_offline_run_without_secrets(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert warnings_of(result) == []
    (path,) = offline_runs(tmp_path)
    items = [
        {key: value for key, value in history["item"].items() if not key.startswith("_")}
        for history in records(path, "history")
    ]
    assert items[0] == {"step": 5, "epoch": 0, "train/loss": 0.25}
    assert items[1] == {"step": 10, "epoch": 1, "train/loss": 0.125, "train/accuracy": 0.75}
    assert items[2]["noise/rate"] == 0.4
    (table,) = (path.parent / "files" / "media" / "table").rglob("*.json")
    content = json.loads(table.read_text())
    assert (content["columns"], content["data"]) == TABLES
    (start,) = records(path, "run")
    config = start["config"]["update"]
    assert start["display_name"] == "first"
    assert (config["run"], config["lr"]) == ({"seed": 7}, 0.5)
    assert config["data"]["root"] == "https://***@host/a?***"
    assert config["evaluate"]["splits"]["val"] == "pipe:curl ***"
    assert [end["exit_code"] for end in records(path, "exit")] == [0]
    assert_no_secret_in(tmp_path, result)


def test_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, start=10)
    ids = {records(path, "run")[0]["run_id"] for path in offline_runs(tmp_path)}
    assert ids == {(tmp_path / "run" / WANDB_ID).read_text()}
    assert len(offline_runs(tmp_path)) == 2


@pytest.mark.parametrize(
    ("settings", "environment"), [({"wandb": "off"}, {}), ({"wandb": "auto"}, {"WANDB_MODE": "disabled"})]
)
def test_wandb_writes_nothing_when_it_is_off(
    tmp_path: Path, settings: dict[str, Any], environment: dict[str, str]
) -> None:
    assert warnings_of(run(tmp_path, environment, **settings)) == []
    assert not (tmp_path / "run" / "wandb").exists()


def test_wandb_is_not_imported_when_it_is_off(tmp_path: Path) -> None:
    result = run(tmp_path, trouble='print("imported:", "wandb" in sys.modules)', wandb="off")
    assert "imported: False" in result.stdout


@pytest.fixture(params=["refuses", "never answers"])
def dead_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that cannot be used."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "never answers":
            server.listen(50)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_logged_in_but_without_a_connection_it_logs_offline(tmp_path: Path, dead_server: str) -> None:
    result = run(tmp_path, {"WANDB_BASE_URL": dead_server, "WANDB_API_KEY": KEY})
    (warning,) = warnings_of(result)
    assert "W&B cannot be reached, logging offline: " in warning
    (path,) = offline_runs(tmp_path)
    assert len(records(path, "history")) == 3
    assert_no_secret_in(tmp_path, result)


def test_online_without_a_login_warns_and_logs_offline(tmp_path: Path) -> None:
    (warning,) = warnings_of(run(tmp_path, wandb="online"))
    assert "log.wandb = online, but W&B is not logged in (`wandb login`): logging offline" in warning
    assert len(offline_runs(tmp_path)) == 1


def test_offline_is_offline_even_with_a_key(tmp_path: Path) -> None:
    environment = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY}
    result = run(tmp_path, environment, wandb="offline")
    assert warnings_of(result) == []
    assert len(offline_runs(tmp_path)) == 1
    assert_no_secret_in(tmp_path, result)


def test_invalid_wandb_settings_cost_one_warning(tmp_path: Path) -> None:
    (warning,) = warnings_of(run(tmp_path, {"WANDB_MODE": "bogus"}))
    assert "W&B failed, the run continues without it: ValidationError" in warning


def test_a_package_that_cannot_be_imported_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "wandb.py").write_text("raise ImportError('no such library: libx.so')")
    both = os.pathsep.join([str(tmp_path / "broken"), str(Path(__file__).parents[3])])
    (warning,) = warnings_of(run(tmp_path, {"PYTHONPATH": both}))
    assert "W&B failed, the run continues without it: ImportError: no such library: libx.so" in warning


def test_an_id_that_cannot_be_saved_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "run" / WANDB_ID).mkdir(parents=True)
    (warning,) = warnings_of(run(tmp_path))
    assert "W&B failed, the run continues without it: IsADirectoryError" in warning


def test_a_wandb_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").write_text("a file where W&B wants a folder")
    (warning,) = warnings_of(run(tmp_path))
    assert "W&B failed, the run continues without it: NotADirectoryError" in warning


def test_killing_the_wandb_process_during_a_run_costs_one_warning(tmp_path: Path) -> None:
    trouble = """
listing = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True)
(core,) = [int(line.split()[0]) for line in listing.stdout.splitlines() if "wandb-core" in line]
os.kill(core, signal.SIGKILL)
"""
    (warning,) = warnings_of(run(tmp_path, trouble=trouble))
    assert "W&B failed, the run continues without it: ConnectionResetError" in warning
