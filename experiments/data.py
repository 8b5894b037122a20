"""What to train on: scikit-learn's digits and a text (both bundled); the user's CIFAR-10, image folders and texts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.settings import ConfigError
from experiments.sharding import derive_seed
from experiments.text import count_training_texts, load_text

if TYPE_CHECKING:
    from experiments.groups import DataSettings

logger = logging.getLogger(__name__)

TEXT_DATA = ("text",)
DATA_NAMES = ("digits", *TEXT_DATA, "cifar10", "imagefolder", "imagenet")
DIGITS_TRAIN, DIGITS_TEST = 1437, 360
CIFAR10_TRAIN = 50_000
CIFAR10_FOLDER = "cifar-10-batches-py"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""As torchvision's."""

Batch = tuple[Tensor, Tensor]
"""Images ``[batch, channels, size, size]`` and labels ``[batch]``, or tokens and labels ``[batch, positions]``."""
Request = tuple[Tensor, int]
"""Indices of samples ``[batch]`` and the seed of their augmentation."""


class Data(Protocol):
    """A data set with a fixed split into training and test samples."""

    num_classes: int
    input_shape: tuple[int, ...]
    train_size: int
    test_size: int

    def training_batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Augmented training batches, one per request, in order."""

    def test_batches(self, requests: Iterable[Tensor]) -> Iterator[Batch]:
        """Test batches, one per tensor of indices, in order."""


class TensorImages:
    """Images that lie in memory as tensors."""

    def __init__(self, train: Batch, test: Batch, num_classes: int, augment: bool) -> None:
        self._train, self._test, self._augment = train, test, augment
        self.num_classes = num_classes
        self.input_shape = tuple(train[0].shape[1:])
        self.train_size, self.test_size = len(train[0]), len(test[0])

    def training_batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """See :class:`Data`."""
        for indices, seed in requests:
            images, labels = self._train[0][indices], self._train[1][indices]
            yield (crop_and_flip(images, seed) if self._augment else images), labels

    def test_batches(self, requests: Iterable[Tensor]) -> Iterator[Batch]:
        """See :class:`Data`."""
        for indices in requests:
            yield self._test[0][indices], self._test[1][indices]


def crop_and_flip(images: Tensor, seed: int, padding: int = 4) -> Tensor:
    """Random crops after zero padding, and random horizontal flips: a function of the seed.

    Args:
        images: ``[batch, channels, height, width]``.
        seed: of the random numbers.
        padding: pixels added on each side.
    """
    generator = torch.Generator().manual_seed(seed)
    count, _, height, width = images.shape
    tops, lefts = torch.randint(0, 2 * padding + 1, (2, count, 1), generator=generator)
    flips = torch.rand(count, 1, generator=generator) < 0.5
    rows = tops + torch.arange(height)
    columns = torch.where(flips, torch.arange(width - 1, -1, -1), torch.arange(width)) + lefts
    padded = F.pad(images, (padding,) * 4)
    picked = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[picked, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


class FolderImages:
    """Images read from ``train/CLASS/*`` and ``val/CLASS/*`` as they are needed."""

    def __init__(self, path: Path, size: int, augment: bool, workers: int, raw: bool = False) -> None:
        from torchvision import datasets
        from torchvision.transforms import v2

        tail = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        if not raw:
            tail.append(v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))  # ImageNet's, as everybody uses
        plain = [v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size)]
        random = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
        self._train = datasets.ImageFolder(str(path / "train"), v2.Compose([*(random if augment else plain), *tail]))
        self._test = datasets.ImageFolder(str(path / "val"), v2.Compose([*plain, *tail]))
        self._workers = workers
        self.num_classes = len(self._train.classes)
        self.input_shape: tuple[int, ...] = (3, size, size)
        self.train_size, self.test_size = len(self._train), len(self._test)
        if self.num_classes == 1:
            logger.warning("data.path=%s has one class only: there is nothing to learn", path)

    def training_batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """See :class:`Data`."""
        keys = ([(int(i), derive_seed(seed, int(i))) for i in indices] for indices, seed in requests)
        return self._read(self._train, keys)

    def test_batches(self, requests: Iterable[Tensor]) -> Iterator[Batch]:
        """See :class:`Data`."""
        return self._read(self._test, ([(int(i), 0) for i in indices] for indices in requests))

    def _read(self, dataset: Any, keys: Iterable[list[tuple[int, int]]]) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(
            _SeededItems(dataset),
            batch_sampler=keys,
            num_workers=self._workers,
            pin_memory=torch.cuda.is_available(),
        )
        return _with_plain_errors(iter(loader))  # the readers start here, not at the first batch


def _with_plain_errors(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches whose readers' mistakes come without the readers' tracebacks."""
    try:
        yield from batches
    except ConfigError as error:
        raise ConfigError(str(error).rpartition(f"{ConfigError.__name__}: ")[2].strip()) from None


class _SeededItems(torch.utils.data.Dataset[Any]):
    """Items whose random transforms depend on the key alone, not on which worker reads them or when."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Any:
        index, seed = key
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                return self._dataset[index]
            except Exception as error:  # PIL has one of its own for each format
                path = self._dataset.samples[index][0]
                raise ConfigError(f"data.path: the image {path} cannot be read: {error}") from None


def load_data(settings: DataSettings, *, raw: bool = False) -> Data:
    """The data set of a configuration.

    Args:
        settings: of the data.
        raw: images with pixels in [0, 1], for an autoencoder, instead of normalised ones.
    """
    if settings.name in TEXT_DATA:
        return load_text(settings.context, settings.path)
    if settings.name == "digits":
        return load_digits(settings.image_size, settings.augment, raw)
    path = data_path(settings)
    if settings.name == "cifar10":
        return load_cifar10(path, settings.image_size, settings.augment, raw)
    return FolderImages(path, settings.image_size, settings.augment, settings.workers, raw)


def raw_shape(settings: DataSettings) -> tuple[int, ...]:
    """The shape of a sample of ``load_data(settings, raw=True)``, without loading it."""
    if settings.name in TEXT_DATA:
        return (settings.context,)
    return (1 if settings.name == "digits" else 3, settings.image_size, settings.image_size)


def load_digits(size: int, augment: bool, raw: bool = False) -> TensorImages:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, resized; always the same split.

    Images are ``[3, size, size]``, three times the same, as models for coloured images want them; ``raw`` ones
    ``[1, size, size]``.
    """
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    digits = bundled()
    train, test = train_test_split(
        range(len(digits.target)), test_size=DIGITS_TEST, random_state=0, stratify=digits.target
    )
    pixels = torch.from_numpy(digits.images).to(torch.float32)[:, None] / 16
    images = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)
    if not raw:
        images = images.expand(-1, 3, -1, -1)
        images = (images - images[train].mean()) / images[train].std()
    labels = torch.from_numpy(digits.target).to(torch.int64)
    return TensorImages((images[train], labels[train]), (images[test], labels[test]), 10, augment)


def load_cifar10(path: Path, size: int, augment: bool, raw: bool = False) -> TensorImages:
    """CIFAR-10 from the folder that holds ``cifar-10-batches-py``, resized where ``size`` is not 32."""
    from torchvision import datasets

    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)  # of the training images
    std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)

    def split(train: bool) -> Batch:
        try:
            data = datasets.CIFAR10(str(path), train=train)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"data.path={path}: CIFAR-10 cannot be read: {error}") from error
        images = torch.from_numpy(data.data).permute(0, 3, 1, 2).to(torch.float32) / 255
        if size != images.shape[-1]:
            images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
        return images if raw else (images - mean) / std, torch.tensor(data.targets)

    return TensorImages(split(True), split(False), 10, augment)


def data_path(settings: DataSettings) -> Path:
    """The data set's folder.

    Raises:
        ConfigError: if it was not given or lacks what it must hold.
    """
    needed = (CIFAR10_FOLDER,) if settings.name == "cifar10" else ("train", "val")
    if settings.path is None:
        raise ConfigError(f"data={settings.name} needs data.path=FOLDER, a folder that holds {' and '.join(needed)}")
    path = Path(settings.path)
    for name in needed:
        if not (path / name).is_dir():
            raise ConfigError(f"data.path={settings.path} has no folder {name}, which data={settings.name} needs")
    return path


def count_training_samples(settings: DataSettings, enough: int) -> int:
    """Training samples that there are, counted at most up to ``enough`` where counting takes long.

    Raises:
        ConfigError: if the data's folder or file was not given or lacks what it must hold.
    """
    if settings.name in TEXT_DATA:
        return count_training_texts(settings.context, settings.path)
    if settings.name == "digits":
        return DIGITS_TRAIN
    path = data_path(settings)
    if settings.name == "cifar10":
        return CIFAR10_TRAIN
    try:
        classes = _classes(path / "train")
        if classes != _classes(path / "val"):
            different = sorted(classes ^ _classes(path / "val"))
            raise ConfigError(f"data.path={path}: train and val have different classes: {', '.join(different[:5])}")
        images = (image for name in sorted(classes) for image in _image_files(path / "train" / name))
        return sum(1 for _, _ in zip(range(enough), images, strict=False))
    except OSError as error:
        raise ConfigError(f"data.path={path}: {error}") from error


def _classes(folder: Path) -> set[str]:
    """The folders inside a folder, each with at least one image.

    Raises:
        ConfigError: if there are none, an image lies beside them, or one holds no image.
    """
    names = set()
    for entry in os.scandir(folder):
        if entry.is_dir():
            names.add(entry.name)
        elif _is_image(entry.name):
            raise ConfigError(f"data.path: {entry.path} lies beside the classes: images belong into {folder}/CLASS/")
    if not names:
        raise ConfigError(f"data.path: {folder} has no folder of a class: images belong into {folder}/CLASS/")
    for name in sorted(names):
        if next(_image_files(folder / name), None) is None:
            raise ConfigError(f"data.path: {folder / name} holds no image ({' '.join(IMAGE_SUFFIXES)})")
    return names


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _image_files(folder: Path) -> Iterator[str]:
    for root, _, names in os.walk(folder, followlinks=True):
        yield from (os.path.join(root, name) for name in names if _is_image(name))
