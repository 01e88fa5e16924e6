"""The rank's device, its threads, and the memory allocator's behaviour."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import torch

from hpcfl.errors import InputError, nearest

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of a rank: "auto" takes a GPU where one is visible, the local rank modulo the visible ones.

    name: "auto", "cpu", "cuda" or "cuda:K". Raises InputError for a device that is not there.
    """
    visible = torch.cuda.device_count()
    kind, _, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not (kind == "cuda" and number.isdigit())):
        raise InputError(
            f'run.device = "{name}": expected "auto", "cpu", "cuda" or "cuda:K"{nearest(name, ["auto", "cpu", "cuda"])}'
        )
    if kind == "cpu" or (kind == "auto" and visible == 0):
        return torch.device("cpu")
    if visible == 0:
        raise InputError(f'run.device = "{name}": no GPU is visible to this process (see: hpcfl doctor)')
    index = int(number) if number else local_rank % visible
    if index >= visible:
        raise InputError(f'run.device = "{name}": only {visible} GPUs are visible, numbered from 0')
    return torch.device("cuda", index)


def settle(threads: int) -> None:
    """Sets the number of threads of this process, and keeps freed memory for the next block.

    glibc gives large freed blocks back to the kernel, which hands them out again page by page: in a loop over models
    of a few MB that cost more than the arithmetic (measured: 12 ms of subtraction became 210 ms).
    """
    torch.set_num_threads(threads)
    np.seterr(over="ignore", invalid="ignore")  # what is no longer finite is found and named (Diverged)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
