"""Every mistake is one line that names the key, before any process starts; identity is what makes runs different."""

from dataclasses import replace

import hydra
import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from experiments.command import CONFIG_SOURCE, _Command, describe, plain
from experiments.config import ProfileConfig, SimulateConfig, TrainConfig
from experiments.groups import TimelineSettings
from experiments.settings import ConfigError
from kfac.config import KFACConfig
from kfac.finals import longest
from kfac.schedules import NAMED_SCHEDULES


def compose(*overrides, name="train"):
    with hydra.initialize_config_module(CONFIG_SOURCE.removeprefix("pkg://"), version_base="1.3"):
        return plain(hydra.compose(name, list(overrides)))


def config(*overrides):
    return TrainConfig.from_dict(compose(*overrides))


def mistake(*overrides, name="train"):
    """The line a user sees."""
    cls = {"train": TrainConfig, "simulate": SimulateConfig, "profile": ProfileConfig}[name]
    with pytest.raises((HydraException, OmegaConfBaseException, ValueError)) as caught:
        cls.from_dict(compose(*overrides, name=name))
    line = describe(name, caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("name", NAMED_SCHEDULES)
def test_shipped_schedules_are_the_librarys(name):
    settings = config(f"schedule={name}").schedule
    assert settings.value == NAMED_SCHEDULES[name]
    assert settings.label == name


def test_shipped_kfac_groups_are_the_librarys():
    assert config("kfac=standard").kfac_config() == KFACConfig()
    assert config("kfac=paper", "optimizer.lr=0.3").kfac_config() == KFACConfig.paper(lr=0.3)


def test_ablations_are_overrides_and_show_in_the_label():
    settings = config("schedule.pipelining=none", "schedule.fusion=optimal", "schedule.lbp_rule=1400").schedule
    assert (settings.switches.pipelining, settings.switches.fusion, settings.switches.lbp_rule) == (
        "none",
        "optimal",
        1400,
    )
    assert settings.label == "spdkfac+pipelining=none+fusion=optimal+lbp_rule=1400"


def test_what_travels_is_an_override():
    given = ("factor_collective=reduce_to_owner", "message_dtype=bfloat16", "gradient_worker_fraction=0.5")
    settings = config(*(f"schedule.{switch}" for switch in given), "schedule.inverse_fusion=planned").schedule
    assert settings.switches == replace(
        NAMED_SCHEDULES["spdkfac"],
        inverse_fusion="planned",
        factor_collective="reduce_to_owner",
        message_dtype="bfloat16",
        gradient_worker_fraction=0.5,
    )
    assert config("schedule=dp_kfac").schedule.switches.factor_collective == "none"


def test_options_per_pattern_are_a_list_on_the_command_line():
    """Hydra's grammar takes no ``*`` in keys; mappings without one, and those of YAML files, stay possible."""
    given = "kfac.overrides=[{pattern: layer1.*, damping: 0.1}, {pattern: '*', lr: 1}, {pattern: layer1.*, max_dim: 3}]"
    found = config(given)
    assert found.kfac_config().overrides == {"*": {"lr": 1}, "layer1.*": {"damping": 0.1, "max_dim": 3}}
    assert list(found.kfac["overrides"]) == ["*", "layer1.*"]  # the last one wins
    assert TrainConfig.from_dict(found.to_dict()) == found
    assert config("kfac.overrides={fc: {damping: 0.1}}").kfac["overrides"] == {"fc": {"damping": 0.1}}
    assert config("kfac.overrides=[]") == config("kfac.overrides={}") == config("kfac.overrides=null") == config()
    in_a_file = {**compose(), "kfac": {**compose()["kfac"], "overrides": {"layer*": {"damping": 0.1}}}}
    assert TrainConfig.from_dict(in_a_file).kfac_config().for_layer("layer2.0").damping == 0.1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('{"layer*":{damping:0.1}}', "cannot read"),
        ("layer1.*:damping=0.1", "cannot read"),
        ("layer1", "'layer1' is no list"),
        ("[layer1]", "is no list"),
        ("[{damping: 1}]", "{'damping': 1} needs a pattern"),
        ("[{pattern: layer1}]", "needs a pattern of module names and options"),
        ("[{pattern: 3, damping: 1}]", "needs a pattern"),
        ("{fc: 1}", "{'fc': 1} needs"),
    ],
)
def test_mistakes_in_options_per_pattern_show_the_form(value, words):
    line = mistake(f"kfac.overrides={value}")
    assert words in line
    assert line.endswith("as in 'kfac.overrides=[{pattern: layer1.*, damping: 0.1}]'")


def test_damping_and_clip_follow_a_loss_that_is_summed():
    for key in ("damping", "kl_clip"):
        usual = getattr(KFACConfig(), key)
        assert config().kfac[key] == usual
        scaled = config("model=autoencoder", "data.image_size=8")
        assert scaled.kfac[key] == scaled.to_dict()["kfac"][key] == 64 * usual
        assert config("model=autoencoder", f"kfac.{key}=0.5").kfac[key] == 0.5
    assert config("model=autoencoder", "kfac.kl_clip=null").kfac_config().kl_clip is None
    assert config("model=autoencoder", "kfac=paper").kfac["damping"] == 0.002
    assert "kfac.damping='automatic' must be a number" in mistake("kfac.damping=automatic")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=resnet19"], "model=resnet19 is not one of: autoencoder, densenet201, gpt, inceptionv4"),
        (["schedule=spd"], "schedule=spd is not one of: auto, dkfac, dp_kfac, kfac, mpdkfac, sgd, spdkfac"),
        (
            ["schedule.pipeline=none"],
            "unknown key schedule.pipeline (did you mean schedule.pipelining?); keys of schedule",
        ),
        (["hydra.launcher.partition=gpu"], "unknown key hydra.launcher.partition: choose site=slurm"),
        (["site.partition=gpu"], "unknown key site: choose site=slurm"),
        (["lr=1"], "unknown key lr (did you mean kfac.lr?); keys: model, data"),
        (["+extra=1"], "unknown key extra; keys: model, data"),
        (["optimise=adam"], "unknown key optimise (did you mean optimizer?)"),
        (["schedule=auto", "schedule.placement=lbp"], "unknown key schedule.placement"),
        (["schedule.placement=best"], "schedule.placement='best' is not one of: non_dist, seq_dist, lbp, optimized"),
        (["kfac.damping=-1"], "kfac.damping=-1 must be a number above 0"),
        (["kfac.scaling=x"], "kfac.scaling='x' is not one of: standard"),
        (["optimizer.lr=-0.1"], "optimizer.lr=-0.1 must be above 0"),
        (["optimizer.lr=fast"], "optimizer.lr='fast' is not a number"),
        (["optimizer.decay_epochs=3"], "optimizer.decay_epochs=3 is not a list"),
        (["optimizer.schedule=poly"], "optimizer.schedule=poly is not one of: constant, step, cosine"),
        (["world_size=0"], "world_size=0 must be at least 1"),
        (["world_size=1.5"], "world_size=1.5 is not a whole number"),
        (
            ["batch_size=1438"],
            "batch_size=1438 on world_size=1 needs 1438 samples per iteration, but data=digits has 1437",
        ),
        (["batch_size=800", "world_size=2"], "batch_size=800 on world_size=2 needs 1600 samples"),
        (
            ["batch_size=30", "kfac.accumulation_steps=4"],
            "batch_size=30 is not a multiple of kfac.accumulation_steps=4",
        ),
        (["model=gpt"], "model=gpt reads text, which data=digits is not: data=text"),
        (["data=text"], "model=resnet20 reads images, which data=text is not: data=digits"),
        (["model=gpt", "data=text", "model.heads=3"], "model.width=128 is not a multiple of model.heads=3"),
        (["model=vit", "data.image_size=30"], "data.image_size=30 is not a multiple of model.patch_size=4"),
        (["model=vit", "model.pooling=max"], "model.pooling=max is not one of: class, mean"),
        (["model=autoencoder", "model.hidden=[]"], "model.hidden=[] leaves the autoencoder without a code"),
        (["model=autoencoder", "label_smoothing=0.1"], "label_smoothing=0.1: model=autoencoder has no labels"),
        (["model=gpt", "data=text", "batch_size=5000"], "needs 5000 samples per iteration, but data=text has 4918"),
        (["schedule=kfac", "world_size=2"], "schedule=kfac runs on one process, not on world_size=2"),
        (["epochs=null"], "epochs and iterations are both null"),
        (["iterations=0"], "iterations=0 must be at least 1"),
        (["sweep=a/b"], "sweep='a/b' is not the name of a folder"),
        (["data=cifar10"], "data=cifar10 needs data.path=FOLDER"),
        (["data=imagenet", "data.path=/nowhere"], "data.path=/nowhere has no folder train"),
        (["cluster=nothing.json"], "cluster=nothing.json is neither one of measure, default, paper64, nor a file"),
        (["model_profile=nothing"], "model_profile=nothing is neither a file"),
        (["tracking=paper"], "tracking=paper is not one of: none, offline, "),
        (["seed=-1"], "seed=-1 must be at least 0"),
        (["world_size=["], "no viable alternative"),
    ],
)
def test_mistakes_name_the_key_and_the_choices(overrides, words):
    assert words in mistake(*overrides)


def test_a_damaged_profile_is_named(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"world_size": 2}')
    assert f"cluster={path}: " in mistake(f"cluster={path}")
    assert "all_reduce" in mistake(f"cluster={path}")
    path.write_text("[")
    assert f"cluster={path}: cannot read" in mistake(f"cluster={path}")


def test_simulate_checks_too():
    assert "model=resnet19 is not one of" in mistake("model=resnet19", name="simulate")
    assert "model_profile=nothing is neither a file nor one of the shipped ones" in mistake(
        "model_profile=nothing", name="simulate"
    )
    for model, data in (("gpt", " data=text"), ("vit", ""), ("autoencoder", "")):
        profile = f"python -m experiments.profile model={model}{data} output=profiles; "
        assert profile in mistake(f"model={model}", name="simulate")
    assert "on world_size=4" in mistake("schedule=kfac", "world_size=4", name="simulate")
    assert SimulateConfig.from_dict(compose("schedule=kfac", name="simulate")).profiles()[1].world_size == 1


def test_identity_ignores_places_and_spectators(tmp_path):
    usual = config().run_id
    assert usual.startswith("resnet20-spdkfac-w1-s0-")
    assert len(usual.rsplit("-", 1)[1]) == 8
    for same in ("runs=/x", "sweep=y", "tracking=none", "name=z", "rerun=true", "progress=1", "checkpoint.every=3"):
        assert config(same).run_id == usual, same
    different = (
        "seed=1",
        "world_size=2",
        "batch_size=16",
        "schedule.fusion=none",
        "optimizer.lr=0.2",
        "epochs=2",
        "timeline.every=10",
        "threads=2",
    )
    identifiers = {config(other).run_id for other in different}
    assert len(identifiers | {usual}) == len(different) + 1
    first, second = "{pattern: layer*, damping: 0.1}", "{pattern: layer1.*, damping: 0.2}"  # the later one wins
    assert config(f"kfac.overrides=[{first},{second}]").run_id != config(f"kfac.overrides=[{second},{first}]").run_id


def test_identity_of_a_profile_is_its_content(tmp_path):
    from kfac.planning.shipped_profiles import load_shipped_cluster

    profile = load_shipped_cluster("paper64")
    profile.save(tmp_path / "a.json")
    profile.save(tmp_path / "b.json")
    profile.at(2).save(tmp_path / "c.json")
    a, b, c = (config(f"cluster={tmp_path}/{name}.json").run_id for name in "abc")
    assert a == b != c


def test_identity_of_a_text_is_its_content(tmp_path):
    for name, text in (("a", "abc " * 500), ("b", "abc " * 500), ("c", "abd " * 500)):
        (tmp_path / name).write_text(text)
    a, b, c = (
        config("model=gpt", "data=text", f"data.path={tmp_path}/{name}", "batch_size=4").run_id for name in "abc"
    )
    assert a == b != c
    assert a != config("model=gpt", "data=text", "batch_size=4").run_id


def test_config_round_trip_and_site():
    data = compose("schedule=auto", "world_size=2", "optimizer.decay_epochs=[1,2.5]", "kfac.include=[fc*]")
    first = TrainConfig.from_dict({**data, "site": {"partition": "gpu"}})
    assert TrainConfig.from_dict(first.to_dict()) == first
    assert first.to_dict()["optimizer"]["decay_epochs"] == [1.0, 2.5]


def test_measuring_only_where_it_is_of_use():
    wanted = {
        name: config(f"schedule={name}", "world_size=2").measures
        for name in ("sgd", "dkfac", "mpdkfac", "spdkfac", "auto")
    }
    assert wanted == {"sgd": False, "dkfac": False, "mpdkfac": False, "spdkfac": True, "auto": False}
    assert config("schedule=auto", "world_size=2", "schedule.replan_after=null").measures
    assert not config("schedule=spdkfac", "world_size=1").measures
    assert not config("schedule=spdkfac", "world_size=2", "cluster=default").measures


def test_auto_plans_anew_where_nothing_else_says_what_things_cost():
    def after(*overrides):
        return config("schedule=auto", "world_size=2", *overrides).replan_after

    assert after() == 10
    assert after("cluster=default") is None
    assert after("cluster=default", "schedule.replan_after=7") == 7
    assert after("schedule.replan_after=null") is None
    assert after("world_size=1") is None
    assert config("schedule=spdkfac", "world_size=2").replan_after is None


def test_times_are_of_the_plan_that_stays():
    choice = ("schedule=auto", "world_size=2", "schedule.replan_after=20", "timeline.start=5")
    replanned = config(*choice, "schedule.replan_turns=0")
    assert (replanned.warmup, replanned.timeline.start) == (21, 21)
    by_turns = config(*choice, "schedule.replan_turns=1")
    assert (by_turns.warmup, by_turns.timeline.start) == (21 + longest(1), 21 + longest(1))
    assert config(*choice, "iterations=30").warmup == 21, "turns that will not all be had"
    assert TrainConfig.from_dict(replanned.to_dict()) == replanned
    short = config("schedule=auto", "world_size=2", "iterations=8", "timeline.start=5")
    assert (short.warmup, short.timeline.start) == (3, 5)


def test_auto_with_fixed_switches():
    settings = config("schedule=auto", "+schedule.fusion=none", "world_size=2").schedule
    assert settings.value == {"name": "auto", "fusion": "none"}
    assert settings.label == "auto+fusion=none"
    assert config("schedule=auto").schedule.value == "auto"
    with pytest.raises(ConfigError, match="replan_after=0 is not a number of iterations"):
        config("schedule=auto", "schedule.replan_after=0")
    with pytest.raises(ConfigError, match="replan_turns=-1 is not a number of turns"):
        config("schedule=auto", "schedule.replan_turns=-1")
    with pytest.raises(ConfigError, match=r"schedule\.fusion='some'"):
        config("schedule=auto", "+schedule.fusion=some")
    local = ("+schedule.factor_collective=none", "+schedule.gradient_worker_fraction=0.0")
    with pytest.raises(ConfigError, match=r"schedule\.replan_after=null"):
        config("schedule=auto", *local)
    assert config("schedule=auto", *local, "schedule.replan_after=null").replan_after is None


def test_recorded_iterations():
    settings = TimelineSettings(start=5, every=10, count=3)
    assert settings.chosen(100) == (5, 15, 25)
    assert settings.chosen(16) == (5, 15)
    assert [settings.chosen(n) for n in (6, 5, 1)] == [(5,), (4,), (0,)]  # the last one rather than none
    assert TimelineSettings().chosen(105) == (5, 25, 45, 65, 85)
    assert TimelineSettings().chosen(8) == (5, 6, 7)
    assert TimelineSettings(count=0).chosen(20) == ()


def test_commands_end_with_one_line_and_touch_nothing(command, tmp_path):
    done = command("train", "optimizer.lr=-1", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: optimizer.lr=-1 must be above 0\n")
    # The third combination is impossible: the first two do not run either.
    done = command("train", "-m", "model=mlp", "world_size=1,2,0", "iterations=1", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: world_size=0 must be at least 1\n")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    done = command("train", "model=mlp", "cluster=default", "runs=file", check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: runs=file: no record can be kept in file/single/mlp")
    assert done.stderr.count("\n") == 1


def test_help_names_groups_keys_and_examples(command, tmp_path):
    text = command("train", "--help").stdout
    for part in (
        "schedule: auto, dkfac, dp_kfac, kfac, mpdkfac, sgd, spdkfac",
        "pipelining: layerwise",
        "python -m experiments.train model=",
        "site=slurm site.partition=",
        "site=NAME",
    ):
        assert part in text
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_does_not_end_a_local_sweep():
    from experiments.command import RunFailedError

    def fail(_):
        raise RunFailedError("told already")

    command = _Command("train", fail)
    assert command(None) is None
    assert command.failures == 1
    command._pid += 1  # a launcher's process elsewhere must see the failure
    with pytest.raises(RunFailedError):
        command(None)
