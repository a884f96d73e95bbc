"""An ordinary training script that does not know about stoker. Its dataset sleeps and spins for each sample."""

import argparse
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


def make(index, sleep_s, spin_s):
    time.sleep(sleep_s)
    until = time.thread_time() + spin_s
    while time.thread_time() < until:
        pass
    return torch.full((8,), float(index)), index % 2


class Samples(Dataset):
    def __init__(self, count, sleep_s, spin_s, slow=-1):
        self.count, self.sleep_s, self.spin_s, self.slow = count, sleep_s, spin_s, slow

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.slow:
            time.sleep(0.25)
        return make(index, self.sleep_s, self.spin_s)


class Stream(IterableDataset):
    def __init__(self, count, sleep_s, spin_s):
        self.count, self.sleep_s, self.spin_s = count, sleep_s, spin_s

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, self.count, stride):
            yield make(index, self.sleep_s, self.spin_s)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start", default=None)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--sleep-ms", type=float, default=2)
    parser.add_argument("--spin-ms", type=float, default=1)
    parser.add_argument("--step-ms", type=float, default=3)
    parser.add_argument("--slow", type=int, default=-1)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument("--local-rank", default=None)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sleep_s, spin_s = options.sleep_ms / 1000, options.spin_ms / 1000
    if options.stream:
        data = Stream(options.samples, sleep_s, spin_s)
    else:
        data = Samples(options.samples, sleep_s, spin_s, options.slow)
    loader = DataLoader(
        data,
        batch_size=options.batch,
        shuffle=not options.stream,
        num_workers=options.workers,
        multiprocessing_context=options.start if options.workers else None,
        persistent_workers=options.persistent,
    )
    validation = DataLoader(Samples(3 * options.batch, sleep_s, spin_s), batch_size=options.batch)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen, total = 0, 0.0
    for _ in range(options.epochs):
        for inputs, targets in loader:
            if seen == options.fail_at:
                raise ValueError("the script's own mistake")
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            time.sleep(options.step_ms / 1000)
            optimizer.step()
            seen += 1
            total += loss.item()
        if options.validate:
            with torch.no_grad():
                for inputs, _ in validation:
                    model(inputs)
    print(f"trained {seen} batches, loss {total:.6f}")
    print("a word on stderr", file=sys.stderr)
    sys.exit(options.exit_code)


if __name__ == "__main__":
    main()
