"""Ranks on the GPUs that a machine has, or seems to have."""

import os

import torch


def take_gpu(rank: int, world_size: int) -> torch.device:
    """Gives this rank a GPU, which others share where there are fewer GPUs than ranks; before its process group is
    made."""
    gpus = torch.cuda.device_count()
    if world_size > gpus:
        # NCCL refuses two ranks of a host on one GPU, unless each says that it is a host of its own.
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device
