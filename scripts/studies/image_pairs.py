"""Pairs of images with a known homography, from photographs that Python packages contain.

The second image of a pair is the first one, warped by a random homography and then degraded (gamma,
gain, blur, noise). So the place of every pixel of the first image is known in the second.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from deployed_rows import SEED
from scipy.ndimage import gaussian_filter, map_coordinates

IMAGES = {
    "skimage/data": [
        "astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "clock_motion.png",
        "coffee.png", "coins.png", "color.png", "grass.png", "gravel.png", "horse.png",
        "hubble_deep_field.jpg", "ihc.png", "logo.png", "moon.png", "motorcycle_left.png",
        "page.png", "retina.jpg", "rocket.jpg", "text.png",
    ],
    "sklearn/datasets/images": ["china.jpg", "flower.jpg"],
    "matplotlib/mpl-data/sample_data": ["grace_hopper.jpg"],
}  # fmt: skip
N_CROPS = 2  # of each image
N_HOMOGRAPHIES = 3  # of each image and each crop
CROP = 0.6  # of the image's sides
STEP = 32  # XFeat and DISK take sides that are multiples of it without another resize
MAX_ROTATION = np.deg2rad(35)
SCALES = (0.55, 1.3)
MAX_PERSPECTIVE = 0.15  # change of the scale from the centre to the border


class ImagePair(NamedTuple):
    """Two images and the homography from pixels (x, y) of the first to those of the second."""

    source: int  # number of the photograph
    is_crop: bool
    first: np.ndarray  # (height, width, 3) float32, 0 to 1
    second: np.ndarray
    homography: np.ndarray  # (3, 3)


def source_paths() -> list[Path]:
    """Files of the photographs."""
    return [
        package_folder(folder.split("/")[0]).parent / folder / name
        for folder, names in IMAGES.items()
        for name in names
    ]


def package_folder(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    return Path(find_spec(package).origin).parent


def make_pairs(path: Path, source: int, side: int, n_crops: int = N_CROPS) -> Iterator[ImagePair]:
    """Pairs of one photograph: of the whole, then of each crop, resized to a longest side."""
    from PIL import Image

    rng = np.random.default_rng([SEED, source])
    with Image.open(path) as file:
        photograph = file.convert("RGB")
    for number in range(1 + n_crops):
        part = photograph if number == 0 else photograph.crop(draw_crop(rng, photograph.size))
        width, height = fit_sides(part.size, side)
        first = np.asarray(part.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255
        for _ in range(N_HOMOGRAPHIES):
            homography = draw_homography(rng, width, height)
            second = degrade(rng, warp(first, homography))
            yield ImagePair(source, number > 0, first, second, homography)


def draw_crop(rng: np.random.Generator, sides: tuple[int, int]) -> tuple[int, int, int, int]:
    """A random box (left, upper, right, lower) of `CROP` times the sides of an image."""
    width, height = (round(CROP * side) for side in sides)
    left, upper = (
        int(rng.integers(s - c + 1)) for s, c in zip(sides, (width, height), strict=True)
    )
    return left, upper, left + width, upper + height


def fit_sides(sides: tuple[int, int], longest: int) -> tuple[int, int]:
    """Multiples of `STEP`, at least one, of about the same ratio; the longer one is `longest`."""
    scale = longest / max(sides)
    width, height = (max(STEP, STEP * round(scale * side / STEP)) for side in sides)
    return width, height


def draw_homography(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A random homography about the centre: rotation, scale, perspective and a small shift."""
    angle = rng.uniform(-MAX_ROTATION, MAX_ROTATION)
    scale = np.exp(rng.uniform(*np.log(SCALES)))
    tilt = rng.uniform(-MAX_PERSPECTIVE, MAX_PERSPECTIVE, 2) / (max(width, height) / 2)
    shift = rng.uniform(-0.05, 0.05, 2) * (width, height)
    centre = np.array([width - 1, height - 1]) / 2
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    turn = np.array([[cos, -sin, 0], [sin, cos, 0], [*tilt, 1]])
    return translation(*(centre + shift)) @ turn @ translation(*-centre)


def translation(x: float, y: float) -> np.ndarray:
    """The homography that adds (x, y)."""
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], float)


def project(homography: np.ndarray, points: np.ndarray) -> np.ndarray:
    """(k, 2) places in the second image of (k, 2) points (x, y) of the first."""
    places = np.column_stack([points, np.ones(len(points))]) @ homography.T
    return places[:, :2] / places[:, 2:]


def warp(image: np.ndarray, homography: np.ndarray) -> np.ndarray:
    """The image seen through a homography, black where it shows nothing; same shape, float32.

    Linear interpolation; an image that shrinks is blurred first, which prevents aliasing.
    """
    height, width, _ = image.shape
    grid = np.indices((height, width))[::-1].reshape(2, -1).T
    places = project(np.linalg.inv(homography), grid).T.reshape(2, height, width)[::-1]
    scale = np.sqrt(np.abs(np.linalg.det(homography[:2, :2])))
    sigma = 0.5 * max(1 / scale - 1, 0)
    blurred = gaussian_filter(image, (sigma, sigma, 0))
    channels = [map_coordinates(blurred[..., c], places, order=1, cval=0) for c in range(3)]
    return np.stack(channels, axis=-1).astype(np.float32)


def degrade(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """Random gamma, gain, blur and noise, as of another camera."""
    gamma, gain = np.exp(rng.uniform(-0.35, 0.35)), rng.uniform(0.75, 1.2)
    sigma = rng.uniform(0, 0.8)
    lit = gain * np.clip(image, 0, 1) ** np.float32(gamma)
    noise = rng.normal(0, rng.uniform(0, 0.02), image.shape)
    noisy = gaussian_filter(lit, (sigma, sigma, 0)) + noise
    return np.clip(noisy, 0, 1).astype(np.float32)
