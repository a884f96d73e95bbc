"""A plain PyTorch training loop, as in any tutorial; it does not know about stoker."""

from __future__ import annotations

import time

import torch

from bench.verdict_cases.work import make_loader, read_faults

faults = read_faults()
model = torch.nn.Linear(16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = make_loader(faults)
# Only where it is needed: threads of GNU's OpenMP that exist before workers are forked may hang in those.
matrix, products = torch.ones(500 if faults.step_cpu_ms else 1, 500), 0
if faults.step_cpu_ms:  # as many products as take so long here, alone
    began = time.perf_counter()
    while time.perf_counter() - began < 0.3:
        matrix @ matrix
        products += 1
    products = round(products * faults.step_cpu_ms / 1e3 / 0.3)
end = time.monotonic() + faults.seconds
while time.monotonic() < end:
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(model(batch["x0"][:, :16]), batch["label"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for _ in range(products):  # a model on the CPU, with all its cores
            matrix @ matrix
        time.sleep(faults.step_ms / 1e3)  # an accelerator at work: takes time but no core
        if time.monotonic() > end:
            break
