"""Times FedAvg as a plain torch loop, one client after the other, on one thread. Needs torch only:

python tests/benchmarks/peer_torch.py cnn --rounds 10 --warmup 2
"""

from __future__ import annotations

import time

import torch
from peer_models import BATCH, LR, arguments, report, workload
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


def fedavg_round(net: nn.Module, clients: list[Batches]) -> None:
    """One round from the net's parameters, which become the mean of the clients'."""
    start = {name: value.clone() for name, value in net.state_dict().items()}
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    for batches in clients:
        net.load_state_dict(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        for name, value in net.state_dict().items():
            total[name] += value
    net.load_state_dict({name: value / len(clients) for name, value in total.items()})


def main() -> None:
    options = arguments("Time FedAvg as a plain loop over clients in torch.")
    net, data = workload(options.model)
    clients = [list(zip(x.split(BATCH), y.split(BATCH), strict=True)) for x, y in data]
    seconds = []
    for _ in range(options.warmup + options.rounds):
        start = time.perf_counter()
        fedavg_round(net, clients)
        seconds.append(time.perf_counter() - start)
    report("torch loop", torch.__version__, options.model, seconds[options.warmup :])


if __name__ == "__main__":
    main()
