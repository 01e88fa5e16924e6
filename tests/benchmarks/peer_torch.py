"""Times FedAvg as a plain torch loop, one client after the other, on one thread. Needs torch only:

python tests/benchmarks/peer_torch.py cnn --rounds 10 --warmup 2
"""

from __future__ import annotations

import torch
from peer_models import BATCH, LR, Turns, model_name, workload
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
    net, data = workload(model_name("Time FedAvg as a plain loop over clients in torch, driven by compare.py."))
    clients = [list(zip(x.split(BATCH), y.split(BATCH), strict=True)) for x, y in data]
    turns = Turns("torch loop", torch.__version__)
    while True:
        start = turns.wait()
        fedavg_round(net, clients)
        turns.done(start)


if __name__ == "__main__":
    main()
