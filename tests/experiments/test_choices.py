"""What --help and the messages for unknown keys list is all that there is, and nothing else."""

import re
from pathlib import Path

import yaml

import experiments.conf
from tests.experiments.test_config import mistake


def test_unknown_keys_say_who_has_them():
    assert "unknown key schedule.replan_turns: only schedule=auto has it" in mistake("schedule.replan_turns=1")
    assert "only model=gpt, model=vit has it; keys of the present choice: name" in mistake("model.heads=1")
    assert "data: simulate has no group data; its groups: model, schedule" in mistake("data=digits", name="simulate")
    assert "profile has no group site; its groups: model, data, kfac, optimizer" in mistake(
        "site=slurm", name="profile"
    )
    keys = mistake("extra=1").partition("keys: ")[2].split(", ")
    assert {"site", "model", "tracking", "progress"} <= set(keys), "also what is left out by default"
    assert len(keys) == len(set(keys))
    assert "scheduler" not in keys


def test_help_leaves_out_no_group_and_no_key(command):
    """Compared with every shipped file; the control: what another command takes is not there."""
    folder = Path(experiments.conf.__file__).parent
    for name in ("train", "simulate", "profile"):
        text = command(name, "--help").stdout
        listed, _, rest = text.partition("Groups (group=choice):\n\n")[2].partition("\n\n")
        groups = dict(line.split(": ") for line in listed.splitlines())
        present, further = rest.split("Keys that other choices bring:")
        further = " ".join(further.partition("Examples:")[0].split())
        for group, choices in groups.items():
            assert choices.split(", ") == sorted(path.stem for path in (folder / group).glob("*.yaml"))
            for path in (folder / group).glob("*.yaml"):
                for key in yaml.safe_load(path.read_text()) or {}:
                    assert key == "defaults" or f"  {key}:" in present or re.search(rf"[:,] {key}\b", further), key
        assert max(map(len, text.splitlines())) <= 130
        everything = {path.name for path in folder.iterdir() if path.is_dir()} - {"hydra", "__pycache__"}
        assert (
            set(groups)
            == {
                "train": everything,
                "profile": everything - {"schedule", "site", "tracking"},
                "simulate": {"model", "schedule"},
            }[name]
        )
