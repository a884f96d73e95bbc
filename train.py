"""`stoker train` with the flags of other training scripts.

python train.py --config configs/resnet_strikes_back.yaml --devices 4 --wandb_project imagenet-resnet50

KEY=VALUE may come before, between or after the flags; `stoker config keys` lists the keys.
"""

import argparse
import sys

from stoker.cli import main

FLAGS_OF_KEYS = {
    "data_root": "data_root",
    "batch_size": "batch_size",
    "epochs": "epochs",
    "lr": "lr",
    "precision": "precision",
    "max_classes": "subset_classes",
    "max_samples_per_class": "subset_train_per_class",
    "devices": "devices",
    "num_nodes": "num_nodes",
    "wandb_project": "wandb_project",
    "wandb_name": "wandb_name",
}
"""Flags that set a key of the config, and its name. Their values are checked with the config."""


def arguments_for_stoker(arguments: list[str]) -> list[str]:
    """The arguments of `stoker train` that mean the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="config file")
    for flag, key in FLAGS_OF_KEYS.items():
        parser.add_argument(f"--{flag}", metavar="VALUE", help=f"the same as {key}=VALUE")
    parser.add_argument(
        "--no_wandb", action="store_true", help="never log to Weights & Biases, whatever the config says"
    )
    parser.add_argument("--resume", metavar="CKPT", help="resume from this checkpoint")
    parser.add_argument("--from", dest="from_", metavar="CKPT", help="start a new run from the weights of this file")
    parser.add_argument("--fresh", action="store_true", help="start over")
    parser.add_argument("--replan", action="store_true", help="resume with another schedule")
    parser.add_argument("--force", action="store_true", help="start even if the plan says that it does not fit")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="config keys to set")
    given = parser.parse_intermixed_args(arguments)
    words = ["train", given.config, *given.overrides]
    for flag, key in FLAGS_OF_KEYS.items():
        value = getattr(given, flag)
        if value is not None and not (given.no_wandb and flag.startswith("wandb")):
            words.append(f"{key}={value}")
    if given.no_wandb:
        words += ["wandb=false", "wandb_project=null"]
    if given.resume:
        words += ["--resume", given.resume]
    if given.from_:
        words += ["--from", given.from_]
    words += [f"--{flag}" for flag in ("fresh", "replan", "force") if getattr(given, flag)]
    return words


if __name__ == "__main__":
    sys.exit(main(arguments_for_stoker(sys.argv[1:])))
