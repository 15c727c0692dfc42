"""The contour walker of ``lra.pathfinder_transfer``: its lessons are right, and a perfect walker answers perfectly."""

import numpy as np
import pytest
import torch

from lra import pathfinder_transfer as transfer
from lra.tasks.pathfinder_generator import generate, parameters


def test_walks_start_at_an_end_and_take_one_paddle_a_step():
    samples = generate(parameters(32), 5, 0, 20)
    walks = transfer.walks(samples)
    assert walks.shape == (20, 2, 2, 15, 2)
    # the same contour from its other end starts where this one stops
    assert np.array_equal(walks[:, :, 0, -1], walks[:, :, 1, 0])
    assert np.array_equal(walks[:, :, 1, -1], walks[:, :, 0, 0])
    # a paddle of 2 pixels and a gap of 2, each rounded up along y and x
    assert np.abs(np.diff(walks, axis=3)).max() <= transfer.REACH
    on_marker = (samples.markers[:, :, None, None] == walks[:, None, :, :, 0]).all(-1)
    assert (on_marker.sum((2, 3)) == 1).all()


def test_a_patch_shows_image_and_trail_around_its_middle():
    images = np.zeros((1, 32, 32), np.uint8)
    images[0, 3, 4] = 255
    canvas = transfer.Canvas(images, np.array([[0, 0]]))
    canvas.draw(np.array([[0, 0]]), np.array([[0, 2]]))
    image, trail = canvas.patches(np.array([[0, 0]]))[0].numpy()
    r = transfer.REACH
    assert [image[r + 3, r + 4], image[r, r], image[r - 1, r]] == [1, 0, transfer.OUTSIDE]
    assert trail[r, r : r + 3].tolist() == [1, 1, 1]
    assert trail.sum() == 3


def test_a_perfect_walker_answers_as_the_labels_say(monkeypatch):
    samples = generate(parameters(32), 6, 0, 200)
    walks, networks = transfer.walks(samples), transfer.Networks()
    ends = (samples.markers[:, 0].astype(int), samples.markers[:, 1].astype(int))
    monkeypatch.setattr(transfer, "find_markers", lambda *_: ends)

    class Oracle:
        """Knows where it has come to by counting its calls: a walk from each marker in turn."""

        calls = 0

        def __call__(self, patches: torch.Tensor) -> torch.Tensor:
            start, step = ends[self.calls // 14], self.calls % 14
            self.calls += 1
            logits = torch.zeros(len(patches), transfer.PATCH**2)
            for i, from_here in enumerate(walks):
                path = next(p for p in from_here.reshape(4, 15, 2) if np.array_equal(p[0], start[i]))
                y, x = path[step + 1] - path[step] + transfer.REACH
                logits[i, y * transfer.PATCH + x] = 1
            return logits

    object.__setattr__(networks, "step", Oracle())
    networks._modules.pop("step")
    answers, labels = transfer.connected(networks, samples.images), samples.labels.astype(bool)
    assert answers[labels].all()
    # now and then the two contours end side by side
    assert answers[~labels].mean() < 0.04
    assert networks.step.calls == 28


def test_lessons_teach_the_next_paddle():
    lesson = next(transfer.lessons(1))
    count = transfer.BATCH * 14
    assert lesson.patches.shape == (count, 2, transfer.PATCH, transfer.PATCH)
    # the walk stands in the middle of its patch, on its trail; the next paddle is drawn there and not walked yet
    middle = transfer.REACH
    assert (lesson.patches[:, 1, middle, middle] == 1).all()
    at = lesson.patches.flatten(2)[torch.arange(count), :, lesson.next_end]
    assert (at[:, 0] > 0.1).float().mean() > 0.99
    assert (at[:, 1] == 0).float().mean() > 0.95
    assert lesson.at_marker.sum() == 2 * transfer.BATCH


def test_it_learns():
    torch.manual_seed(0)
    networks = transfer.Networks(width=8)
    with torch.no_grad():
        lesson = next(transfer.lessons(1))
        before = torch.nn.functional.cross_entropy(networks.step(lesson.patches), lesson.next_end)
    transfer.train(networks, 60)
    with torch.no_grad():
        after = torch.nn.functional.cross_entropy(networks.step(lesson.patches), lesson.next_end)
    assert after < before - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: expected a whole number above 0"),
        (["nowhere"], "nowhere: expected curv_contour_length_14/imgs and"),
    ],
)
def test_bad_arguments_end_in_one_line_before_the_training(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.argv", ["scripts/pathfinder_transfer", *arguments])
    with pytest.raises(SystemExit) as stopped:
        transfer.main()
    assert stopped.value.code == 2
    assert f"error: {message}" in capsys.readouterr().err
