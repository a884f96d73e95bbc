"""A training script whose options choose how it ends."""

import argparse
import os
import pathlib
import signal
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self, kill_at):
        self.kill_at = kill_at

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(8)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--killed-worker", action="store_true")
    parser.add_argument("--kill-self-at", type=int, default=-1)
    parser.add_argument("--ready-file", default=None)
    parser.add_argument("--catch", action="store_true")
    parser.add_argument("--catch-interrupt", action="store_true")
    options = parser.parse_args()
    caught = []
    if options.catch:
        signal.signal(signal.SIGTERM, lambda *_: caught.append("SIGTERM"))
        signal.signal(signal.SIGINT, lambda *_: caught.append("SIGINT"))
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(20 if options.killed_worker else -1), batch_size=4, num_workers=1)
    try:
        train(options, loader, model, optimizer, caught)
    except KeyboardInterrupt:
        if not options.catch_interrupt:
            raise
        print("interrupted", flush=True)
        time.sleep(0.5)
        print("saved after the interrupt", flush=True)
        raise SystemExit(6) from None


def train(options, loader, model, optimizer, caught):
    for number, inputs in enumerate(loader):
        model(inputs).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        if number == options.kill_self_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 3 and options.ready_file:
            pathlib.Path(options.ready_file).touch()
        if caught:
            print(f"ended by {caught[0]} after a checkpoint")
            raise SystemExit(5)


if __name__ == "__main__":
    main()
