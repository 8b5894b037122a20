"""The shipped text: what is declared of it, and that samples are it, each character once."""

import torch

from experiments.data import count_training_samples, load_data
from experiments.groups import DataSettings
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
