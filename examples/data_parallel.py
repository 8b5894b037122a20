"""K-FAC on a DistributedDataParallel model: torchrun --nproc-per-node 2 examples/data_parallel.py"""

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
torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
y = torch.tensor(digits.target, device=device)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
preconditioner = KFAC(model, KFACConfig(lr=0.05, damping=0.01), schedule="spdkfac")

for epoch in range(3):
    for batch in torch.randperm(len(x)).split(64):
        mine = batch[rank::world_size]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        loss.backward()  # DistributedDataParallel averages the gradients here
        preconditioner.step()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model.module(x).argmax(1) == y).float().mean()
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {accuracy.item():.1%}")
dist.destroy_process_group()
