"""Which device a rank computes on."""

from __future__ import annotations

import torch

from experiments.settings import ConfigError


def choose_device(device: str, local_size: int) -> str:
    """``cpu`` or ``cuda``.

    Args:
        device: as configured; ``auto`` takes GPUs where there is one for each rank.
        local_size: ranks that share this process's view of the machine (a GPU serves one rank only: NCCL refuses more).

    Raises:
        ConfigError: if GPUs are asked for and there are too few.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda" if count >= local_size else "cpu"
    if device == "cuda" and count < local_size:
        raise ConfigError(
            f"device=cuda with world_size={local_size} needs as many GPUs, this machine has {count}: "
            "use device=cpu, or a smaller world_size"
        )
    return device
