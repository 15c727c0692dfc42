"""Does a network that learns from generated Pathfinder images solve published ones as well?

A classifier that sees nothing but labels needs more images than a CPU gets through in an hour. The generator knows
more: where each contour runs. So one small CNN learns to find the markers and another one to walk along a contour,
from the end of a paddle to the end of the next, seeing a patch of the image and its own trail. The answer is whether
the walk from one marker comes to the other, and is scored on held-out generated images and on published ones.

Shapes: N images, S = 32 their side, C = 14 paddles of a contour, D = 15 side of a patch. Coordinates are (y, x).
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lra.errors import UserError
from lra.stats import wilson
from lra.tasks import pathfinder_release
from lra.tasks.pathfinder_generator import Samples, generate, parameters

SIDE, DIFFICULTY = 32, "hard"
REACH = 7
PATCH = 2 * REACH + 1
OUTSIDE = -0.5
"""Intensity of a patch beyond the border of the image; inside it is 0 to 1."""
ARRIVED = 1.0
"""Pixels between the walk and a marker at which it has come there."""
LAST_STEPS = 3
"""Steps in which it may come there: it passes other markers on its way, and at its end may have skipped a paddle.
In 1.2 % of the images another end is as near, so that even a perfect walker scores 98.8 %."""
NO_MARKER = 2
"""Pixels around the first marker where the second is not looked for."""
TRAIN_SEED, TEST_SEED = 1, 2
BATCH = 32
LINE_STEPS = 200


class Networks(nn.Module):
    """The two CNNs; they share nothing but their optimiser."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.markers = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(),
            nn.Conv2d(12, 1, 3, padding=1),
        )  # fmt: skip
        """``(N, 1, S, S)`` -> logits that a marker's middle is there, alike."""
        self.step = nn.Sequential(
            nn.Conv2d(2, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(),
            nn.Conv2d(width, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(16 * width, 128), nn.ReLU(), nn.Linear(128, PATCH * PATCH),
        )  # fmt: skip
        """Image and trail ``(N, 2, D, D)`` -> logits of where in the patch the next paddle ends."""


class Canvas:
    """Images and the trails of the walks on them, with a border as wide as a patch needs."""

    def __init__(self, images: np.ndarray, start: np.ndarray) -> None:
        border = ((0, 0), (REACH, REACH), (REACH, REACH))
        self._planes = np.stack([np.pad(images / np.float32(255), border, constant_values=OUTSIDE)] * 2, axis=1)
        self._planes[:, 1] = 0
        self._each = np.arange(len(images))
        self.draw(start, start)

    def draw(self, start: np.ndarray, end: np.ndarray) -> None:
        """Add the line from ``start`` to ``end``, both (N, 2), to the trails."""
        for share in np.linspace(0, 1, REACH):
            y, x = np.rint(start + (end - start) * share).astype(int).T + REACH
            self._planes[self._each, 1, y, x] = 1

    def patches(self, middle: np.ndarray) -> Tensor:
        """Image and trail around ``middle`` (N, 2): ``(N, 2, D, D)``."""
        y, x = (middle[:, i, None] + np.arange(PATCH) for i in (0, 1))
        found = self._planes[self._each[:, None, None], :, y[:, :, None], x[:, None, :]]
        return torch.from_numpy(np.ascontiguousarray(found.transpose(0, 3, 1, 2)))


def walks(samples: Samples) -> np.ndarray:
    """(N, 2, 2, C + 1, 2): of each contour, from each of its ends, the end pixel and then where every paddle ends."""
    paddles = samples.paddles.astype(np.int64)
    forth = np.concatenate([paddles[:, :, :1, :2], paddles[..., 2:]], axis=2)
    back = np.concatenate([paddles[:, :, -1:, 2:], paddles[:, :, ::-1, :2]], axis=2)
    return np.stack([forth, back], axis=2)


class Lesson(NamedTuple):
    """What one batch teaches."""

    patches: Tensor
    """``(N C, 2, D, D)``"""
    next_end: Tensor
    """``(N C)``, index into the D x D places of a patch."""
    images: Tensor
    """``(N, 1, S, S)``"""
    at_marker: Tensor
    """``(N, S, S)``, 1 in the middle of a marker, else 0."""


def lessons(steps: int) -> Iterator[Lesson]:
    """Batches of images that are each seen once, and on each one contour from one end, both chosen at random."""
    rng = np.random.default_rng(TRAIN_SEED)
    for step in range(steps):
        samples = generate(parameters(SIDE, DIFFICULTY), TRAIN_SEED, step * BATCH, BATCH)
        each = np.arange(BATCH)
        path = walks(samples)[each, rng.integers(0, 2, BATCH), rng.integers(0, 2, BATCH)]
        canvas, patches, targets = Canvas(samples.images, path[:, 0]), [], []
        for here, there in zip(path[:, :-1].swapaxes(0, 1), path[:, 1:].swapaxes(0, 1)):
            patches.append(canvas.patches(here))
            offset = there - here + REACH
            targets.append(offset[:, 0] * PATCH + offset[:, 1])
            canvas.draw(here, there)
        at_marker = np.zeros(samples.images.shape, np.float32)
        at_marker[each[:, None], samples.markers[..., 0], samples.markers[..., 1]] = 1
        yield Lesson(
            torch.cat(patches),
            torch.from_numpy(np.concatenate(targets)),
            torch.from_numpy(samples.images[:, None] / np.float32(255)),
            torch.from_numpy(at_marker),
        )


def train(networks: Networks, steps: int) -> None:
    """AdamW over ``steps`` batches, with a linear decay to zero in the last two thirds."""
    warmup = max(1, min(100, steps // 10))
    optimizer = torch.optim.AdamW(networks.parameters(), lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1.5 * (1 - step / steps), 1)
    )
    right, start = 0.0, time.perf_counter()
    print(f"training on {steps * BATCH:,} images; a line every {LINE_STEPS} batches", flush=True)
    for step, lesson in enumerate(lessons(steps), 1):
        logits = networks.step(lesson.patches)
        # two pixels of a thousand are a marker's middle
        marker_loss = functional.binary_cross_entropy_with_logits(
            networks.markers(lesson.images)[:, 0], lesson.at_marker, pos_weight=torch.tensor(20.0)
        )
        loss = functional.cross_entropy(logits, lesson.next_end) + marker_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(networks.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        right += (logits.argmax(1) == lesson.next_end).float().mean().item() / LINE_STEPS
        if step % LINE_STEPS == 0:
            seconds = time.perf_counter() - start
            print(f"{seconds:5.0f} s, {step * BATCH:,} images: {right:.1%} of the paddles found", flush=True)
            right = 0.0


@torch.no_grad()
def find_markers(networks: Networks, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest two places of ``images`` (N, S, S), each (N, 2)."""
    heat = networks.markers(torch.from_numpy(images[:, None] / np.float32(255)))[:, 0].numpy()
    y, x = np.mgrid[:SIDE, :SIDE]
    found = []
    for _ in range(2):
        at = np.stack(np.unravel_index(heat.reshape(len(heat), -1).argmax(1), (SIDE, SIDE)), axis=1)
        found.append(at)
        near = (y - at[:, 0, None, None]) ** 2 + (x - at[:, 1, None, None]) ** 2 <= NO_MARKER**2
        heat = np.where(near, -np.inf, heat)
    return found[0], found[1]


@torch.no_grad()
def connected(networks: Networks, images: np.ndarray) -> np.ndarray:
    """bool (N,): whether a walk from one marker comes to the other, in either direction."""
    first, second = find_markers(networks, images)
    arrived = np.zeros(len(images), bool)
    for start, goal in ((first, second), (second, first)):
        canvas, here = Canvas(images, start), start
        steps = parameters(SIDE, DIFFICULTY).contour_length
        for step in range(steps):
            place = networks.step(canvas.patches(here)).argmax(1).numpy()
            offset = np.stack([place // PATCH, place % PATCH], axis=1) - REACH
            there = np.clip(here + offset, 0, SIDE - 1)
            canvas.draw(here, there)
            here = there
            if step >= steps - LAST_STEPS:
                arrived |= np.linalg.norm(here - goal, axis=1) <= ARRIVED
    return arrived


def read(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, S, S) and labels (N,) of a folder ``pathfinder32``."""
    records = pathfinder_release.records(pathfinder_release.difficulty_folder(folder, DIFFICULTY))
    records = [record for record in records if not record.known_bad]
    return pathfinder_release.images(records, SIDE), np.array([record.label for record in records])


def report(name: str, right: np.ndarray) -> str:
    """One line of the table; ``right`` (N,) is bool."""
    low, high = wilson(int(right.sum()), len(right))
    return f"| {name} | {len(right):,} | {right.mean():.1%} | {low:.1%} - {high:.1%} |"


def main() -> None:
    """Train, then print a Markdown table."""
    parser = argparse.ArgumentParser(prog="scripts/pathfinder_transfer", description=__doc__.splitlines()[0])
    folder_help = "a folder pathfinder32 with published images; without it only ours are scored"
    parser.add_argument("folder", type=Path, nargs="?", help=folder_help)
    steps_help = f"batches of {BATCH} images to train on; the default of 3000 takes a quarter of an hour"
    parser.add_argument("--steps", type=int, default=3000, help=steps_help)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected a whole number above 0")
    try:
        published = None if options.folder is None else read(options.folder)
    except UserError as error:
        parser.error(str(error))
    torch.manual_seed(TRAIN_SEED)
    networks = Networks()
    train(networks, options.steps)
    ours = generate(parameters(SIDE, DIFFICULTY), TEST_SEED, 0, 2000)
    print("\n| images | number | accuracy | 95 % interval |\n| --- | ---: | ---: | --- |")
    print(report("generated here, held out", connected(networks, ours.images) == ours.labels))
    if published is not None:
        images, labels = published
        print(report("published", connected(networks, images) == labels))


if __name__ == "__main__":
    main()
