"""What is suggested for a mistyped name: what a person would have meant, else every choice there is."""

import sys

import pytest
from omegaconf import OmegaConf

from lra import cli
from lra.config import compose_run, from_yaml
from lra.errors import UserError


def said(overrides):
    with pytest.raises(UserError) as error:
        compose_run(overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("trainer.epoch=1", "trainer.epochs"),
        ("trainer.batchsize=8", "trainer.batch_size"),
        ("task.lenght=64", "task.length"),
        ("attention.kernl=torch", "attention.kernel"),
        ("model.heads=4", "model.num_heads"),
        ("task.rows=5", "task.train_rows or task.validation_rows or task.test_rows"),
        ("steps=5", "trainer.steps"),
        ("task.steps=5", "trainer.steps"),
        ("trainer.length=64", "task.length"),
        ("sed=1", "seed"),
        ("tasks=listops", "task"),
        ("datadir=x", "data_dir"),
        ("attention=preformer", "performer"),
        ("attention=rwkv", "rwkv4 or rwkv7"),
        ("model=base", "lra-base"),
        ("experiment=matched/listop", "matched/listops"),
        ("experiment=listops", "lra2020/listops or matched/listops or nystrom/listops or s4/listops"),
    ],
)
def test_a_typo_finds_what_was_meant(override, meant):
    text = said([override])
    assert text.startswith(override)
    assert text.endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize(
    ("override", "choices"),
    [
        ("trainer.speed=1", ["here trainer has name | steps |", " | seconds |", " | deterministic"]),
        ("trainer.learning_rate=1", ["here trainer has", " | lr |"]),
        ("trainer.foo=1", ["here trainer has", " | on_oom |"]),
        ("task.size=5", ["here task has", " | length |"]),
        ("model.depth=3", ["here model has num_layers | width |"]),
        ("attention.features=8", ["here attention has name | causal | kernel | num_heads"]),
        ("tracker=disabled", ["choose attention | task |", " | tracking |", "experiment", "regime"]),
        ("zzz=1", ["choose attention | task |", " | seed |"]),
        ("attention=transformer", ["choose flash | linear |"]),
        ("attention=x", ["choose flash | linear |"]),
        ("task=imdb", ["choose copying |", " | text"]),
    ],
)
def test_what_is_like_nothing_gets_the_choices_and_no_guess(override, choices):
    text = said([override])
    assert "did you mean" not in text
    for part in choices:
        assert part in text


def test_the_keys_are_those_of_the_chosen_backend(tmp_path):
    assert said(["attention=performer", "attention.num_feature=8"]).endswith("did you mean attention.num_features?")
    (tmp_path / "config.yaml").write_text(
        OmegaConf.to_yaml({"attention": {"name": "performer"}, "task": {"name": "text"}})
    )
    for override, meant in (("attention.num_feature=8", "attention.num_features"), ("task.valid=test", "")):
        with pytest.raises(UserError) as error:
            from_yaml(tmp_path / "config.yaml", [override])
        # the defaults are flash and listops, which have no such keys
        assert str(error.value).endswith(f"did you mean {meant}?" if meant else "test_rows | validation")


@pytest.mark.parametrize(
    ("name", "hint"), [("tarin", "; did you mean train?"), ("tabel", "; did you mean table?"), ("list", "")]
)
def test_commands_too(name, hint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lra", name])
    assert cli.main() == 2
    assert capsys.readouterr().err.rstrip().endswith(f"bench | doctor{hint}")
