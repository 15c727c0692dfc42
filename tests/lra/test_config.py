"""Configuration: groups compose, bad values name their key, the hash sees what changes numbers."""

from pathlib import Path

import pytest
import yaml

import attention
from lra.config import compose_run
from lra.errors import UserError
from lra.regimes import regime_of


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        compose_run(list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_compose_and_resolve():
    config = compose_run([])
    assert (config.attention.name, config.task.name, config.task.length) == ("flash", "listops", 2000)
    assert config.device in ("cpu", "cuda")
    assert config.trainer.precision in ("fp32", "bf16")
    assert "${" not in config.yaml()
    assert "auto" not in (config.device, config.trainer.precision)


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_every_backend_composes_with_its_own_schema(name):
    config = compose_run([f"attention={name}"])
    assert type(config.attention) is attention.load(name).Config
    assert config.attention.name == name


@pytest.mark.parametrize(("regime", "length"), [("native", 2000), ("short", 256), ("medium", 1024), ("long", 4096)])
def test_regimes_set_the_length(regime, length):
    assert compose_run([f"regime={regime}"]).task.length == length


def test_the_command_line_beats_the_regime():
    assert compose_run(["regime=short", "task.length=300"]).task.length == 300


def test_regime_bounds():
    lengths = {
        1: "short",
        511: "short",
        512: "medium",
        1999: "medium",
        2000: "long",
        8000: "long",
        8001: "extreme",
    }
    assert {n: regime_of(n) for n in lengths} == lengths


def test_experiments_win_over_the_defaults():
    config = compose_run(["experiment=lra2020/listops"])
    assert (config.model.width, config.model.num_layers, config.model.pooling) == (512, 4, "cls")
    assert (config.trainer.schedule, config.trainer.warmup, config.trainer.steps) == ("rsqrt", 1000, 5000)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["task=lisstops"], ["task=lisstops is unknown", "listops"]),
        (["attention=preformer"], ["attention=preformer is unknown", "did you mean performer?"]),
        (["regime=huge"], ["regime=huge is unknown", "medium"]),
        (["trainer.stepps=5"], ["trainer.stepps", "did you mean trainer.steps?"]),
        (["modle.width=5"], ["modle", "did you mean model?"]),
        (["trainer.steps=many"], ["trainer.steps=many", "many"]),
        (["trainer.steps=1e3"], ["trainer.steps=1e3"]),
        (["attention.num_features=8", "attention=flash"], ["attention.num_features"]),
        (["model.num_heads=3"], ["model.num_heads=3", "model.width=64", "[1, 2, 4"]),
        (["trainer.warmup=600"], ["trainer.warmup=600", "trainer.steps=600"]),
        (["trainer.warmup=700"], ["trainer.warmup=700", "trainer.steps=600"]),
        (["trainer.accumulation=5"], ["trainer.accumulation=5", "trainer.batch_size=32"]),
        (["trainer.steps=0"], ["trainer.steps=0", "give 1 ..."]),
        (["trainer.lr=0"], ["trainer.lr=0"]),
        (["trainer.lr=nan"], ["trainer.lr=nan", "not finite"]),
        (["trainer.eps=inf"], ["trainer.eps=inf", "not finite"]),
        (["model.width=10000000"], ["model.width=10000000"]),
        (["attention.name=performer"], ["attention.name=performer", "attention=performer"]),
        (["model.pooling=cls", "attention.causal=true"], ["model.pooling=cls"]),
        (["device=cpu:5"], ["cpu:5"]),
        (["runs_dir="], ["runs_dir="]),
        (["trainer.schedule=step"], ["trainer.schedule", "cosine | linear | rsqrt"]),
        (["trainer.precision=fp16"], ["trainer.precision=fp16", "use bf16"]),
        (["device=tpu"], ["device='tpu'", "cpu"]),
        (["seed=-1"], ["seed=-1"]),
        (["task.length=3"], ["task.length=3"]),
        (["task.length=10000000"], ["task.length=10000000"]),
        (["attention.kernel=warp"], ["attention.kernel", "warp"]),
        (["attention="], ["attention= is unknown", "performer"]),
        (["trainer=null"], ["trainer=null", "a group needs a name"]),
        (["~attention"], ["attention= is unknown", "performer"]),
        (["trainer.steps=null"], ["trainer.steps=null"]),
        (["trainer.steps=5", "trainer.steps=1.5"], ["trainer.steps=1.5: expected a whole number, found '1.5'"]),
        (["trainer.lr=x"], ["trainer.lr=x: expected a number, found 'x'"]),
        (["trainer.compile=maybe"], ["trainer.compile=maybe: expected true or false, found 'maybe'"]),
        (["data_dir=null"], ["data_dir=null: expected a value, found null; leave it out"]),
        (["model.match=nosuch"], ["model.match='nosuch' is unknown; choose softmax | flash"]),
        (["runs_dir='~no-such-user/x'"], ["runs_dir=~no-such-user/x: expected a path", "without a home"]),
        (["task.source='~no-such-user/x'"], ["task.source=~no-such-user/x: expected a path"]),
        (["+extra=1"], ["extra: there is no such key"]),
        (["+trainer.extra=1"], ["trainer.extra: there is no such key"]),
        (["regime=short,medium"], ["regime=short,medium", "lra sweep"]),
        (["attention"], ["attention"]),
        (["task.length=[1,2"], ["task.length=[1,2"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_with_key_and_way_out(overrides, parts):
    message = refusal(*overrides)
    for part in parts:
        assert part in message


def test_a_network_that_no_memory_holds_is_checked_without_its_weights():
    # 65536 x 65536 x 3 numbers of 4 bytes for queries, keys and values alone: 48 GiB
    assert compose_run(["model.width=65536", "model.num_heads=64"]).model.width == 65_536


def test_the_hash_sees_numbers_and_nothing_else():
    base = compose_run([]).fingerprint()
    assert compose_run(["tracking=disabled", "runs_dir=/elsewhere", "trainer.log_every=3"]).fingerprint() == base
    for override in ("seed=1", "trainer.lr=0.002", "attention=linear", "task.length=512", "model.dropout=0"):
        assert compose_run([override]).fingerprint() != base, override


def test_a_protocol_is_what_backends_and_seeds_share():
    def protocol(*overrides: str) -> str:
        return compose_run(list(overrides)).fingerprint(without=("attention", "seed"))

    assert protocol("attention=linear", "seed=3") == protocol("attention=rwkv4")
    assert protocol("trainer.steps=700") != protocol()


def test_seeds_of_one_backend_share_its_hash():
    def mixer(*overrides: str) -> str:
        return compose_run(["attention=performer", *overrides]).mixer_fingerprint()

    assert mixer("seed=1") == mixer("seed=2")
    assert mixer("attention.num_features=8") != mixer()


def test_run_ids_are_unique_and_readable():
    config = compose_run(["attention=performer", "regime=short", "seed=7"])
    assert config.run_id.startswith("listops-256-performer-s7-")
    assert config.run_dir == Path(config.runs_dir) / config.run_id
    assert Path(config.runs_dir).is_absolute()


def test_the_saved_yaml_gives_the_values_back():
    config = compose_run(["attention=performer", "model.num_heads=4"])
    saved = yaml.safe_load(config.yaml())
    assert saved["attention"]["num_heads"] == 4
    assert saved["trainer"]["lr"] == config.trainer.lr
