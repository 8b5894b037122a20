"""No secret of the environment or of the command line is recorded, printed or sent."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.launch import LaunchError, launch
from experiments.redaction import redact, redacted
from experiments.tracking import open_tracker
from tests.experiments.tracked import open_record, patient, train_row
from tests.wandb_server.fixtures import KEY

ROOT = Path(__file__).parents[2]


def test_no_secret_is_recorded_or_sent(tmp_path, monkeypatch, wandb_client):
    monkeypatch.setenv("SOME_API_KEY", KEY)
    monkeypatch.setenv("WANDB_API_KEY", KEY[::-1])
    record = open_record(tmp_path)
    record.write("environment.json", {"variables": {"URL": f"https://x/{KEY}"}})
    tracker = open_tracker(patient(wandb="offline", tensorboard=True), record)
    tracker.log(train_row(0))
    tracker.failed(RuntimeError(f"401 for {KEY} and {KEY[::-1]}"))
    tracker.finish("failed")
    record.end_segment("failed", {"message": f"401 for {KEY}"})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        assert KEY.encode() not in content, path
        assert KEY[::-1].encode() not in content, path
    assert "401 for ***" in (record.path / "run.json").read_text()


SECRET = "hunter2-hunter2"


@pytest.mark.parametrize(
    "arguments",
    [
        [f"wandb.api_key={SECRET}"],
        [f"+site.env={{WANDB_API_KEY: {SECRET}}}"],
        [f"site.setup=[export HF_TOKEN='{SECRET}']"],
        [f"--token={SECRET}"],
        ["--password", SECRET],
        [f"+site.extra.export=WANDB_API_KEY={SECRET}"],
        [f"+auth={{kind: basic, token: {SECRET}}}"],
        ["-c", f"main(credentials='{SECRET}')"],
    ],
)
def test_secrets_of_the_command_line_are_masked_everywhere(arguments):
    text = f"{' '.join(arguments)} and later {SECRET}!"
    assert SECRET not in redact(text, {}, ["python", *arguments])
    assert SECRET in redact(text, {}, ["python", "schedule=dkfac"])


def test_what_only_looks_like_a_secret_stays():
    environ = {"GIT_AUTHOR_NAME": "Somebody", "XKB_KEYBOARD": "us-international", "AUTH_SOCK": "/run/agent.1"}
    arguments = ["model.tokenizer=bert-base-uncased", "keywords=dkfac,spdkfac", "max_tokens=4096", "--monkeypatch", "x"]
    text = "bert-base-uncased by Somebody: dkfac,spdkfac us-international /run/agent.1 4096"
    assert redact(text, environ, arguments) == text


def test_redaction_finds_values_and_names():
    environ = {"MY_TOKEN": "abcdefgh12", "OTHER_KEY": "abcdefgh", "KEYS": "true", "SLURM_JWT": "eyJ.abc.def"}
    assert redact("abcdefgh12 abcdefgh true eyJ.abc.def", environ, []) == "*** *** true ***"
    assert redacted({"api_key": "x", "keys": 3, "nested": [{"password": "y", "name": "z"}]}) == {
        "api_key": "***",
        "keys": 3,
        "nested": [{"password": "***", "name": "z"}],
    }
    setup = ["export HF_TOKEN=abcdefgh12 LEVEL=debug-all", "module load cuda"]
    assert redacted({"site": {"setup": setup}}) == {
        "site": {"setup": ["export HF_TOKEN=*** LEVEL=debug-all", "module load cuda"]}
    }


def leak(payload, rank):
    """What a rank may say of a secret: it prints it, logs it, and dies of it."""
    print("printed", os.environ["SOME_TOKEN"], file=sys.stderr)  # noqa: T201
    logging.warning("logged %s", os.environ["SOME_TOKEN"])
    raise RuntimeError(f"401 for {os.environ['SOME_TOKEN']}")


def test_what_ranks_print_is_logged_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    with pytest.raises(LaunchError, match="401 for"):
        launch("tests.experiments.test_redaction:leak", {}, 1, log_folder=tmp_path)
    text = (tmp_path / "rank0.log").read_text()
    assert "printed ***" in text
    assert "logged ***" in text
    assert SECRET not in text


def test_what_a_command_prints_is_without_its_secrets():
    code = "import sys, experiments.redaction as r; r.mask_output(); print(sys.argv); int(sys.argv[1])"
    command = [sys.executable, "-c", code, f"api_key={SECRET}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "['-c', 'api_key=***']\n"
    assert "invalid literal for int() with base 10: 'api_key=***'" in done.stderr
    assert SECRET not in done.stderr


TRACKED = """
import sys
from pathlib import Path
from experiments.tracking import open_tracker
from tests.experiments.tracked import open_record, patient, train_row
tracker = open_tracker(patient(wandb=sys.argv[1]), open_record(Path(sys.argv[2])))
tracker.log(train_row(0))
tracker.finish("finished")
assert tracker.working
"""


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_wandb_gets_the_command_line_and_the_job_without_secrets(tmp_path, server, monkeypatch, mode):
    monkeypatch.setenv("SLURM_JWT", SECRET[::-1])
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NAME", "named-by-slurm")
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    command = [sys.executable, "-c", TRACKED, mode, str(tmp_path / "runs"), "harmless=argument", f"api_key={SECRET}"]
    subprocess.run(command, cwd=ROOT, check=True, env=environ)
    kept = [path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    sent = server.bodies + list(server.run.files.values()) if mode == "online" else []
    everything = b"".join(kept + sent)
    assert b"harmless=argument" in everything
    assert SECRET.encode() not in everything
    assert SECRET[::-1].encode() not in everything
    if mode == "online":
        assert b"named-by-slurm" in everything
