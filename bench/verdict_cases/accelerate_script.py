"""The same faults in a loop prepared by accelerate, whose loader fetches each batch one step ahead."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator

from bench.verdict_cases.work import make_loader, read_faults

faults = read_faults()
accelerator = Accelerator(cpu=True)
plain = torch.nn.Linear(16, 2)
model, optimizer, loader = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()), make_loader(faults))
end = time.monotonic() + faults.seconds
while time.monotonic() < end:
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(model(batch["x0"][:, :16]), batch["label"])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        time.sleep(faults.step_ms / 1e3)  # an accelerator at work: takes time but no core
        if time.monotonic() > end:
            break
