"""Real images, the same for everybody, split over ranks without loss or repetition, and resumable anywhere."""

import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits as bundled

from experiments.data import count_training_samples, crop_and_flip, load_data, raw_shape
from experiments.groups import DataSettings
from experiments.settings import ConfigError
from experiments.sharding import Shards, derive_seed


def shards(**changes):
    return Shards(**{"size": 100, "batch_size": 8, "rank": 0, "world_size": 1, "seed": 3, **changes})


def test_the_shape_of_samples_is_known_before_loading():
    for settings in (DataSettings(name="digits", image_size=9), DataSettings(name="text", context=11)):
        assert raw_shape(settings) == load_data(settings, raw=True).input_shape


def test_an_epoch_sees_every_image_once():
    parts = [shards(rank=rank, world_size=3, batch_size=4) for rank in range(3)]
    assert parts[0].iterations_per_epoch == 8
    seen = torch.cat([part.indices(i) for part in parts for i in range(8)])
    assert seen.unique().numel() == seen.numel() == 96


def test_split_over_ranks_is_the_same_global_batch():
    one = shards(batch_size=16)
    two = [shards(batch_size=8, world_size=2, rank=rank) for rank in range(2)]
    for iteration in (0, 5, 6, 13):
        assert torch.equal(one.indices(iteration), torch.cat([part.indices(iteration) for part in two]))


def test_permutations_depend_on_seed_and_epoch_alone():
    first = shards().indices(14)
    shards().indices(0)
    torch.manual_seed(9)
    assert torch.equal(shards().indices(14), first)
    assert not torch.equal(shards().indices(2), first)  # the same place of another epoch
    assert not torch.equal(shards(seed=4).indices(14), first)


def test_derived_seeds_differ():
    assert len({derive_seed(0, "augment", i, r) for i in range(50) for r in range(4)}) == 200
    assert 0 <= derive_seed("x") < 2**63


def test_digits_are_the_bundled_images():
    images = load_data(DataSettings(name="digits", image_size=8))
    assert (images.train_size, images.test_size, images.num_classes) == (1437, 360, 10)
    assert images.input_shape == (3, 8, 8)
    train, labels = next(iter(images.training_batches([(torch.arange(1437), 0)])))
    test, test_labels = next(iter(images.test_batches([torch.arange(360)])))
    assert train.mean().abs() < 1e-4
    assert train.std() == pytest.approx(1, abs=1e-3)
    # Undo the normalisation: up to order, exactly scikit-learn's pixels with their labels.
    digits = bundled()
    scale = 16 / (torch.cat((train, test)).max() - train.min())
    pixels = ((torch.cat((train, test)) - train.min()) * scale)[:, 0].round().long().flatten(1)
    keyed = {(tuple(p), int(y)) for p, y in zip(pixels.tolist(), torch.cat((labels, test_labels)), strict=True)}
    assert keyed == {
        (tuple(p), int(y)) for p, y in zip(digits.images.reshape(-1, 64).astype(int), digits.target, strict=True)
    }
    assert torch.equal(test_labels.bincount(), torch.tensor([36, 36, 35, 37, 36, 37, 36, 36, 35, 36]))


def test_digits_resized():
    images = load_data(DataSettings(name="digits", image_size=32))
    batch, _ = next(iter(images.training_batches([(torch.arange(4), 0)])))
    assert batch.shape == (4, 3, 32, 32)
    assert torch.equal(batch[:, 0], batch[:, 2])


def test_raw_digits_are_the_bundled_pixels_in_one_channel():
    train, normalised = (load_data(DataSettings(name="digits", image_size=8), raw=raw) for raw in (True, False))
    assert train.input_shape == (1, 8, 8)
    (images, labels), (others, same) = (
        next(iter(d.training_batches([(torch.arange(99), 0)]))) for d in (train, normalised)
    )
    assert torch.equal(labels, same)
    assert torch.equal((images * 16).round(), images * 16)
    scale = (others[:, :1].max() - others.min()) / images.max()
    assert torch.allclose(others[:, :1], others.min() + scale * images, atol=1e-5)


def test_crop_and_flip_by_hand():
    images = torch.arange(2 * 3 * 5 * 6, dtype=torch.float32).view(2, 3, 5, 6) + 1
    out = crop_and_flip(images, seed=1, padding=2)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    for one, whole in zip(out, padded, strict=True):
        crops = [whole[:, top : top + 5, left : left + 6] for top in range(5) for left in range(5)]
        assert any(torch.equal(one, crop) or torch.equal(one, crop.flip(2)) for crop in crops)
    assert torch.equal(out, crop_and_flip(images, seed=1, padding=2))
    assert not torch.equal(out, crop_and_flip(images, seed=2, padding=2))


def test_cifar10_from_its_files(tmp_path, monkeypatch):
    from torchvision import datasets

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        data = generator.integers(0, 256, (4, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [0, 1, 2, 9]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    images = load_data(DataSettings(name="cifar10", path=str(tmp_path)))
    assert (images.train_size, images.test_size, images.input_shape) == (20, 4, (3, 32, 32))
    batch, labels = next(iter(images.test_batches([torch.tensor([3])])))
    raw = pickle.loads((folder / "test_batch").read_bytes())["data"][3].reshape(3, 32, 32) / 255
    expected = (raw[1] - 0.4822) / 0.2435  # green
    assert np.allclose(batch[0, 1], expected, atol=1e-5)
    assert labels.tolist() == [9]


@pytest.fixture
def folders(tmp_path):
    for split, count in (("train", 6), ("val", 2)):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for k in range(count):
                pixels = np.full((40, 50, 3), 100 * number + 10 * k, np.uint8)
                pixels[:, 25:] += 5
                Image.fromarray(pixels).save(tmp_path / split / name / f"{k}.png")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_folders_are_read_the_same_whoever_reads(folders, workers):
    def read(workers, requests):
        settings = DataSettings(name="imagefolder", path=str(folders), image_size=16, augment=True, workers=workers)
        return list(load_data(settings).training_batches(requests))

    requests = [(torch.tensor([0, 7, 11]), 5), (torch.tensor([3, 4, 5]), 6)]
    alone = read(0, requests)
    batches = read(workers, requests)
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 1], [0, 0, 0]]
    for (one, _), (other, _) in zip(alone, batches, strict=True):
        assert torch.equal(one, other)
        assert one.shape == (3, 3, 16, 16)
    assert torch.equal(read(0, requests[1:])[0][0], alone[1][0])  # a resumed run sees the same
    assert not torch.equal(read(0, [(requests[0][0], 99)])[0][0], alone[0][0])


def test_counting_stops_when_it_is_enough(folders):
    settings = DataSettings(name="imagenet", path=str(folders))
    assert count_training_samples(settings, enough=100) == 12
    assert count_training_samples(settings, enough=5) == 5
    (folders / "train" / "cat" / "notes.txt").write_text("no image")
    assert count_training_samples(settings, enough=100) == 12


def test_missing_data_name_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="has no folder train"):
        count_training_samples(DataSettings(name="imagenet", path=str(tmp_path)), 1)
    with pytest.raises(ConfigError, match=r"needs data\.path=FOLDER, a folder that holds train and val"):
        count_training_samples(DataSettings(name="imagefolder"), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: [p.unlink() for p in (f / "val" / "dog").iterdir()], "val/dog holds no image"),
        (lambda f: shutil.move(f / "train" / "cat" / "0.png", f / "train" / "0.png"), "train/0.png lies beside the"),
        (lambda f: (f / "val" / "dog").rename(f / "val" / "wolf"), "train and val have different classes: dog, wolf"),
        (lambda f: [shutil.rmtree(p) for p in (f / "val").iterdir()], "val has no folder of a class"),
    ],
)
def test_impossible_folders_are_found_before_training(folders, change, words):
    settings = DataSettings(name="imagefolder", path=str(folders))
    assert count_training_samples(settings, 100) == 12
    change(folders)
    with pytest.raises(ConfigError, match=words):
        count_training_samples(settings, 100)


@pytest.mark.parametrize(("workers", "damage"), [(0, "cut"), (0, "no image"), (1, "cut")])
def test_a_damaged_image_is_named(folders, workers, damage):
    path = folders / "train" / "dog" / "3.png"
    path.write_bytes(path.read_bytes()[:60] if damage == "cut" else b"GIF")
    settings = DataSettings(name="imagefolder", path=str(folders), image_size=16, workers=workers)
    batches = load_data(settings).training_batches([(torch.tensor([9]), 0)])
    with pytest.raises(ConfigError) as caught:
        next(batches)
    assert str(caught.value).startswith(f"data.path: the image {path} cannot be read: ")
    assert "\n" not in str(caught.value)


def test_one_class_is_warned_of(folders, caplog):
    for split in ("train", "val"):
        shutil.rmtree(folders / split / "dog")
    load_data(DataSettings(name="imagefolder", path=str(folders), image_size=16))
    assert "has one class only" in caplog.text
