"""K-FAC and gradient averaging on several processes: torchrun --nproc-per-node 2 examples/two_processes.py"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from kfac import KFAC, KFACConfig

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
torch.manual_seed(0)  # the same model and the same shuffling everywhere
digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
y = torch.tensor(digits.target, device=device)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
preconditioner = KFAC(model, KFACConfig(lr=0.05, damping=0.01), schedule="spdkfac", average_gradients=True)

for epoch in range(3):
    for batch in torch.randperm(len(x)).split(64):
        mine = batch[rank::world_size]  # every process takes its share of the batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        preconditioner.step()  # averages the gradients too
        optimizer.step()
    with torch.no_grad():  # a pass that is not trained on
        accuracy = (model(x).argmax(1) == y).float().mean()
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {accuracy.item():.1%}")
dist.destroy_process_group()
