"""A training script that does not know about stoker, with mistakes that are seldom noticed; none with --careful."""

import argparse
import time

import torch
from torch.utils.data import DataLoader, Dataset

KEPT = 1 << 16  # a quarter of a megabyte


class Samples(Dataset):
    def __init__(self, count, side, changes, keeps):
        self.count, self.side, self.changes, self.keeps = count, side, changes, keeps
        self.seen = []
        self.cache = {}

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(0.001)
        if self.keeps:
            self.seen.append(torch.ones(KEPT))
        self.cache[index % 4] = index
        side = self.side + (index // 4 % 3 if self.changes else 0)
        return torch.full((1, side, side), float(index)), index % 2


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolve, self.norm = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4)
        self.drop, self.classify = torch.nn.Dropout(0.1), torch.nn.Linear(4, 2)

    def forward(self, images):
        features = self.norm(self.convolve(images)).mean((2, 3))
        return self.classify(self.drop(features))


def make_loader(options, count):
    data = Samples(count, 8, not options.careful, options.keeps)
    return DataLoader(data, 4, num_workers=options.workers, persistent_workers=options.careful and options.workers > 0)


def validate(model, loader):
    model.eval()  # and never train() again
    with torch.no_grad():
        for images, _ in loader:
            model(images)
            time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--careful", action="store_true")
    parser.add_argument("--keeps", action="store_true", help="the data set keeps something of every sample")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = not options.careful
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader, validation = make_loader(options, options.samples), DataLoader(Samples(40, 8, False, False), 4)
    losses, total = [], 0.0
    for _ in range(options.epochs):
        if options.careful:
            model.train()
        else:
            loader = make_loader(options, options.samples)
        for step, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            time.sleep(0.005)
            if not options.careful:
                total += loss.item()  # in every step
                losses.append(loss)
            elif step % 20 == 0:
                total += loss.item()
        if not options.careful:
            validate(model, validation)
    print(f"loss {float(total):.3f}, {len(losses)} kept")


if __name__ == "__main__":
    main()
