"""Presets: every one composes as a whole, names its source, and says what the facts say."""

import pytest

import attention
import lra.tasks
from lra import presets
from lra.config import compose_run
from lra.errors import UserError
from lra.matched import choose
from lra.trainer import parameter_count
from models import build_model

HERE = [name for name in presets.names() if name.split("/")[-1] in lra.tasks.REGISTRY]
FAMILIES = ("lra2020", "nystrom", "s4", "matched")


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("mixer", ["flash", "rwkv4"])
def test_every_preset_composes(name, mixer):
    family = name.split("/")[0]
    if family == "s4" and "s4" not in lra.tasks.load(name.split("/")[-1]).FIDELITIES:
        pytest.skip("the task has no such input pipeline")
    config = compose_run([f"experiment={name}", f"attention={mixer}"])
    assert config.task.name == name.split("/")[-1]
    if family in FAMILIES:
        assert config.trainer.name == family
        text = " ".join(presets.notes(name))
        assert "Source: " in text or "Ours: " in text or "as LRA released it" in text


@pytest.mark.parametrize(
    ("name", "layers", "width", "steps", "batch", "peak"),
    [
        # section 2 of the published configurations: layers, width, steps, rows a step, largest learning rate
        ("lra2020/listops", 4, 512, 5_000, 32, 1.58e-3),
        ("lra2020/text", 4, 256, 20_000, 32, 5.6e-4),
        ("lra2020/image", 1, 128, 35_000, 256, 5e-4),
        ("nystrom/text", 2, 64, 20_000, 32, 1e-4),
        ("nystrom/retrieval", 2, 64, 30_000, 32, 1e-4),
        ("nystrom/pathfinder", 2, 64, 62_400, 256, 1e-4),
        ("s4/image", 6, 512, 180_000, 50, 1e-2),
    ],
)
def test_published_figures(name, layers, width, steps, batch, peak):
    if name not in HERE:
        pytest.skip("the task is not there")
    from lra.budget import Budget, Spent
    from lra.optim import learning_rate

    config = compose_run([f"experiment={name}"])
    trainer = config.trainer
    assert (config.model.num_layers, config.model.width) == (layers, width)
    assert (trainer.steps, trainer.batch_size) == (steps, batch)
    budget = Budget(trainer, 1000)
    rates = [learning_rate(trainer, s, budget.decay(s, Spent())) for s in range(1, trainer.steps, 25)]
    assert max(rates) == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("mixer", list(attention.REGISTRY))
def test_matched_models_have_equal_parameters_within_two_percent(mixer):
    sizes = []
    for name in ("softmax", mixer):
        config = compose_run(["experiment=matched/listops", f"attention={name}"])
        model = build_model(config.model, config.attention, vocab_size=16, num_classes=10, length=2000)
        sizes.append(parameter_count(model))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


def test_matched_rows_share_a_protocol_whatever_rate_was_chosen():
    def protocol(*overrides: str) -> str:
        return compose_run(["experiment=matched/listops", *overrides]).protocol_fingerprint()

    assert protocol("attention=flash", "trainer.lr=3e-4") == protocol("attention=mamba", "trainer.lr=3e-3", "seed=4")
    assert protocol("trainer.lr_tried=[0.1]") != protocol()
    assert protocol("trainer.steps=1000") != protocol()


def test_the_choice_is_the_best_on_validation():
    assert choose({1e-3: 0.4, 3e-3: 0.6, 3e-4: None}) == 3e-3
    assert choose({3e-3: 0.5, 1e-3: 0.5}) == 1e-3
    assert choose({1e-3: None}) is None


def test_the_table_of_presets(capsys):
    assert presets.main(["matched/listops", "lra2020/listops"]) == 0
    assert "matched/listops  length  2000" in capsys.readouterr().out
    assert presets.main(["lra2020/listops"]) == 0
    assert "Known faults of the original" in capsys.readouterr().out
    with pytest.raises(UserError, match="there is no preset nothing; choose"):
        presets.main(["nothing"])
