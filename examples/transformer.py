"""K-FAC on a transformer: padded text, bfloat16, EKFAC with adaptive damping: python examples/transformer.py"""

import torch
from torch import nn

from experiments.text import read_text
from experiments.transformers import GPT
from kfac import KFAC, KFACConfig

PADDING = -100  # the label that cross_entropy and kfac.curvature leave out
torch.manual_seed(0)
lines = [line for line in read_text().split("\n") if line][:1000]
number = {symbol: index for index, symbol in enumerate(sorted(set("".join(lines))))}
longest = max(map(len, lines)) - 1  # a line's characters but the last are read, all but the first are predicted
x, y = torch.zeros(len(lines), longest, dtype=torch.long), torch.full((len(lines), longest), PADDING)
for i, line in enumerate(lines):
    codes = torch.tensor([number[symbol] for symbol in line])
    x[i, : len(line) - 1], y[i, : len(line) - 1] = codes[:-1], codes[1:]

model = GPT(len(number), longest, depth=2, width=64, heads=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
config = KFACConfig(
    lr=0.1,
    damping=0.01,
    damping_method="exact",  # on the eigenvalues of A x G, which EKFAC corrects
    inverse_method="ekfac",
    inverse_interval=5,
    damping_adaptation="levenberg_marquardt",
)
preconditioner = KFAC(model, config)
print(preconditioner.summary())


def loss_of(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss per character that is no padding, and the logits it is a function of."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x[batch])
    logits = logits.float()
    return nn.functional.cross_entropy(logits, y[batch], ignore_index=PADDING), logits


train, test = torch.arange(900), torch.arange(900, len(lines))
for epoch in range(3):
    for batch in train[torch.randperm(len(train))].split(30):
        optimizer.zero_grad()
        loss, logits = loss_of(batch)
        with preconditioner.curvature(logits, "classification", targets=y[batch], ignore_index=PADDING):
            loss.backward()
        preconditioner.step()
        optimizer.step()
        if preconditioner.adapts_damping:  # every damping_interval steps
            with torch.no_grad():
                preconditioner.adapt_damping(loss, loss_of(batch)[0])
    with torch.no_grad():
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test loss {loss_of(test)[0].item():.3f}")
