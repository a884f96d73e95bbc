"""A script with one line of stoker in it; its worker is spawned and therefore imports this file again."""

import sys

import torch

import stoker

handle = stoker.watch(report=sys.argv[1])


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.zeros(8)


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs in torch.utils.data.DataLoader(
        Samples(), batch_size=4, num_workers=1, multiprocessing_context=sys.argv[2]
    ):
        model(inputs).sum().backward()
        optimizer.step()
    assert handle.observed().steps == 9
