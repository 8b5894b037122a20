"""Text to model character by character: a user's file, or the beginning of Shakespeare's plays, which is shipped.

``shakespeare.txt.gz`` holds the first 349,740 characters (to the end of a speech; from Coriolanus to Richard II) of
the "tiny Shakespeare" file that Andrej Karpathy put together for char-rnn
(https://github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt, at commit 6f9487a). Shakespeare's works are in
the public domain.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from experiments.settings import ConfigError

TEXT_FILE = Path(__file__).with_name("shakespeare.txt.gz")
CHARACTERS, VOCABULARY = 349_740, 63
"""Of the file: how many, and how many different ones."""
TRAIN_CHARACTERS = CHARACTERS * 9 // 10
"""The first nine tenths of a text are trained on, the rest is for tests."""


@cache
def read_text() -> str:
    """The whole shipped text."""
    return gzip.decompress(TEXT_FILE.read_bytes()).decode("ascii")


def samples(characters: int, context: int) -> int:
    """How many samples without overlap there are in a text: a sample needs one character more than it predicts."""
    return max(0, (characters - 1) // context)


class CharacterText:
    """A text as samples of ``context`` characters and, for each of them, the character that follows it.

    Characters are numbered in the order of their code points. Samples do not overlap.

    Args:
        train, test: the two parts of the text.
        context: characters of a sample.
    """

    def __init__(self, train: str, test: str, context: int) -> None:
        symbols = sorted(set(train + test))
        number = {symbol: index for index, symbol in enumerate(symbols)}
        self._train, self._test = (torch.tensor([number[c] for c in part]) for part in (train, test))
        self.symbols = "".join(symbols)
        self.num_classes = len(symbols)
        self.input_shape: tuple[int, ...] = (context,)
        self.train_size, self.test_size = (samples(len(part), context) for part in (train, test))

    def training_batches(self, requests: Iterable[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and their successors, ``[batch, context]`` each; see :class:`experiments.data.Data`."""
        return (self._cut(self._train, indices) for indices, _ in requests)

    def test_batches(self, requests: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """As :meth:`training_batches`."""
        return (self._cut(self._test, indices) for indices in requests)

    def _cut(self, text: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        context = self.input_shape[0]
        places = indices[:, None] * context + torch.arange(context)
        return text[places], text[places + 1]


def read_own_text(path: str) -> str:
    """The text of a user's file.

    Raises:
        ConfigError: if it cannot be read, is empty or is no UTF-8.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"data.path={path} cannot be read: {error.strerror}; it must be a text file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path={path} is no UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x}): convert it, "
            "as with iconv -t UTF-8"
        ) from error
    if not text:
        raise ConfigError(f"data.path={path} is empty")
    return text.replace("\r\n", "\n")


def count_training_texts(context: int, path: str | None = None) -> int:
    """Training samples of a user's file, or of the shipped text.

    Raises:
        ConfigError: as :func:`read_own_text`, and for a file of which the training or the test part holds no sample.
    """
    characters = CHARACTERS if path is None else len(read_own_text(path))
    train = _training_part(characters)
    if not samples(characters - train, context):  # the test part is the smaller one
        raise ConfigError(
            f"data.path={path} has {characters} characters: with data.context={context} it needs at least "
            f"{10 * context + 1}, a tenth of which is for tests"
        )
    return samples(train, context)


def _training_part(characters: int) -> int:
    return characters * 9 // 10


def load_text(context: int, path: str | None = None) -> CharacterText:
    """A user's file, or the shipped text, in samples of ``context`` characters; always the same split."""
    text = read_text() if path is None else read_own_text(path)
    train = _training_part(len(text))
    return CharacterText(text[:train], text[train:], context)
