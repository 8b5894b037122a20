"""K-FAC in a plain PyTorch loop on one process: python examples/one_process.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from kfac import KFAC, KFACConfig

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
preconditioner = KFAC(model, KFACConfig(lr=0.05, damping=0.01))  # the one new object

for epoch in range(3):
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        preconditioner.step()  # the one new line
        optimizer.step()
    with torch.no_grad():  # a pass that is not trained on
        accuracy = (model(x).argmax(1) == y).float().mean()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {accuracy.item():.1%}")
