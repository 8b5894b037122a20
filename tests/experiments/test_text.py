"""The shipped text: what is declared of it, and that samples are it, each character once."""

import pytest
import torch

from experiments.data import count_training_samples, load_data
from experiments.groups import DataSettings
from experiments.settings import ConfigError
from experiments.text import CHARACTERS, TRAIN_CHARACTERS, VOCABULARY, CharacterText, load_text, read_text, samples


def test_the_text_is_as_declared():
    text = read_text()
    assert len(text) == CHARACTERS
    assert len(set(text)) == VOCABULARY
    assert text.startswith("First Citizen:\nBefore we proceed any further, hear me speak.\n")
    assert text.endswith("how is't with aged Gaunt?\n\n")


def test_samples_are_the_text_and_its_successors():
    text, data = read_text(), load_text(50)
    assert (data.num_classes, data.input_shape) == (VOCABULARY, (50,))
    for batches, part, size in (
        (data.training_batches([(torch.arange(data.train_size), 0)]), text[:TRAIN_CHARACTERS], data.train_size),
        (data.test_batches([torch.arange(data.test_size)]), text[TRAIN_CHARACTERS:], data.test_size),
    ):
        tokens, labels = next(iter(batches))
        assert tokens.shape == labels.shape == (size, 50)
        words = ["".join(data.symbols[i] for i in rows.flatten().tolist()) for rows in (tokens, labels)]
        assert part.startswith(words[0])
        assert part[1:].startswith(words[1])
        assert len(part) - len(words[0]) <= 50


def test_samples_by_hand():
    data = CharacterText("abcab", "cab", 2)
    ((tokens, labels),) = data.training_batches([(torch.tensor([1, 0]), 0)])
    assert tokens.tolist() == [[2, 0], [0, 1]]
    assert labels.tolist() == [[0, 1], [1, 2]]
    assert (data.train_size, data.test_size) == (2, 1)
    assert [samples(n, 2) for n in (0, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]


def test_counting_is_loading():
    settings = DataSettings(name="text", context=77)
    assert count_training_samples(settings, enough=1) == load_data(settings).train_size


def test_a_text_of_ones_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "grüße\r\n".encode() * 100)  # as other systems write it
    settings = DataSettings(name="text", context=10, path=str(path))
    data = load_data(settings)
    assert (data.symbols, data.num_classes) == ("\negrßü", 6)
    assert count_training_samples(settings, enough=1) == data.train_size == (540 - 1) // 10
    assert data.test_size == (60 - 1) // 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b"abc", r"has 3 characters: with data.context=64 it needs at least 641, a tenth of which is for tests"),
        (b"abcd" * 160, "has 640 characters"),
        ("gr\u00fc\u00dfe".encode("latin-1") * 500, r"is no UTF-8 text \(byte 2 is 0xfc\)"),
    ],
)
def test_mistakes_with_ones_own_text_are_named(tmp_path, content, words):
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"data.path={path} {words}"):
        count_training_samples(DataSettings(name="text", path=str(path)), enough=1)
    if content == b"abc":
        path.write_bytes(b"abcd" * 160 + b"a")  # as many as it says
        settings = DataSettings(name="text", path=str(path))
        assert (count_training_samples(settings, enough=1), load_data(settings).test_size) == (8, 1)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_data(DataSettings(name="text", path=str(tmp_path)))
