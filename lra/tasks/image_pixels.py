"""CIFAR-10 pictures as gray levels: decoding, two conversions to gray, area resampling.

Shapes: R pictures, S pixels a side.
"""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

SIDE = 32
"""Pixels a side of every CIFAR-10 picture."""
LEVELS = 256
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What Pillow raises for bytes that are no whole image."""


class BadPicture(Exception):
    """What was expected of a picture and what was found."""


def decode(data: bytes) -> np.ndarray:
    """The 32 x 32 RGB picture, uint8 (S, S, 3), encoded in ``data`` as PNG or what else Pillow reads.

    Raises ``BadPicture``.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except UNREADABLE:
        raise BadPicture(f"expected an encoded image, found {len(data)} bytes that do not decode") from None
    if image.size != (SIDE, SIDE) or image.mode != "RGB":
        raise BadPicture(f"expected {SIDE} x {SIDE} RGB, found {image.width} x {image.height} {image.mode}")
    return np.asarray(image)


def tensorflow_gray(rgb: np.ndarray) -> np.ndarray:
    """Gray levels (R, S, S) of ``rgb`` (R, S, S, 3), both uint8, as TensorFlow's ``image.rgb_to_grayscale``.

    That scales to [0, 1], weights by .2989, .5870, .1140 and cuts 255.5 times the sum down to an integer
    (tensorflow/python/ops/image_ops_impl.py, ``convert_image_dtype``). Here in whole numbers, so equal on every
    machine; of all colours float32 gives 1 in 70,000 another level, the one beside.
    """
    red, green, blue = np.moveaxis(rgb.astype(np.int64), -1, 0)
    # 255.5 / 255 = 511 / 510, and the weights are in ten-thousandths
    return ((2989 * red + 5870 * green + 1140 * blue) * 511 // 5_100_000).astype(np.uint8)


def pillow_gray(rgb: np.ndarray) -> np.ndarray:
    """Gray levels (R, S, S) of ``rgb`` (R, S, S, 3), both uint8, by Pillow's luma, as torchvision's ``Grayscale``."""
    tall = np.ascontiguousarray(rgb).reshape(-1, rgb.shape[2], 3)
    return np.asarray(Image.fromarray(tall).convert("L")).reshape(rgb.shape[:3])


GRAY: dict[str, Callable[[np.ndarray], np.ndarray]] = {"lra": tensorflow_gray, "s4": pillow_gray}
"""By fidelity."""


def resample(gray: np.ndarray, side: int) -> np.ndarray:
    """Area resampling of ``gray`` (R, S, S) to (R, side, side), both uint8; one side is a multiple of the other.

    A smaller picture has means of the pixels covered, halves rounded up; a larger one repeats each pixel.
    """
    if side >= gray.shape[1]:
        factor = side // gray.shape[1]
        return gray.repeat(factor, axis=1).repeat(factor, axis=2)
    factor = gray.shape[1] // side
    sums = gray.reshape(-1, side, factor, side, factor).sum(axis=(2, 4), dtype=np.int64)
    return ((2 * sums + factor**2) // (2 * factor**2)).astype(np.uint8)


def again(rgb: np.ndarray, fidelity: str, side: int) -> np.ndarray:
    """What ``resample(GRAY[fidelity](rgb), side)`` must be, by other arithmetic; (R, side, side) uint8."""
    if fidelity == "lra":
        # no colour comes nearer to a whole level than 1e-7, which float64 tells apart
        gray = np.floor(255.5 * (rgb / 255) @ (0.2989, 0.5870, 0.1140))
    else:
        # ITU-R 601-2 in 16-bit fixed point
        gray = (rgb.astype(np.int64) @ (19_595, 38_470, 7_471) + 32_768) >> 16
    if side < SIDE:
        step = SIDE // side
        gray = np.floor(sum(gray[:, i::step, j::step] for i in range(step) for j in range(step)) / step**2 + 0.5)
    else:
        near = np.arange(side) * SIDE // side
        gray = gray[:, near[:, None], near]
    return gray.astype(np.uint8)
