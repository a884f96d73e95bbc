"""An image training script in the style of torchvision's and timm's references; it does not know about stoker."""

import argparse

import torch
import torchvision
from torchvision import transforms


def torchvision_loader(folder, workers):
    pipeline = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
    data = torchvision.datasets.ImageFolder(folder, pipeline)
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)


def timm_loader(folder, workers):
    import timm.data

    data = timm.data.create_dataset("", root=folder, split="train")
    return timm.data.create_loader(
        data, (3, 32, 32), 4, is_training=True, num_workers=workers, use_prefetcher=False, use_multi_epochs_loader=True
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--timm", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loader = (timm_loader if options.timm else torchvision_loader)(options.folder, options.workers)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    print("done")


if __name__ == "__main__":
    main()
