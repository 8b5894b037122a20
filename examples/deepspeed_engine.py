"""K-FAC inside a DeepSpeed engine (ZeRO 0-2): torchrun --nproc-per-node 2 examples/deepspeed_engine.py"""

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import nn

from kfac import KFACConfig
from kfac.communication import init_from_torchrun, shutdown
from kfac.engine import attach

communicator = init_from_torchrun()
rank, world_size = communicator.rank, communicator.world_size
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
settings = {
    "train_micro_batch_size_per_gpu": 32,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,  # DeepSpeed's default, 1.0, would clip the preconditioned gradient
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
attach(engine, KFACConfig(damping=0.01), schedule="spdkfac")  # the one new line

for epoch in range(3):
    for batch in torch.randperm(len(x))[: len(x) // 64 * 64].split(64):
        mine = batch[rank::world_size]
        loss = nn.functional.cross_entropy(engine(x[mine].to(engine.device)), y[mine].to(engine.device))
        engine.backward(loss)
        engine.step()
    with torch.no_grad():  # a pass that is not trained on
        accuracy = (engine.module(x.to(engine.device)).argmax(1).cpu() == y).float().mean()
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {accuracy.item():.1%}")
shutdown()
