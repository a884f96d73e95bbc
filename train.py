"""`stoker train` with the flags of other training scripts.

python train.py --config configs/resnet_strikes_back.yaml --devices 4 --wandb_project imagenet-resnet50
"""

import argparse
import sys

from stoker.cli import main


def arguments_for_stoker(arguments: list[str]) -> list[str]:
    """The arguments of `stoker train` that mean the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="config file")
    parser.add_argument("--wandb_project", help="log to this project at Weights & Biases")
    parser.add_argument("--wandb_name", help="name of the run at Weights & Biases")
    parser.add_argument(
        "--no_wandb", action="store_true", help="never log to Weights & Biases, whatever the config says"
    )
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--devices", type=int, help="GPUs on each node")
    parser.add_argument("--num_nodes", type=int)
    parser.add_argument("--resume", metavar="CKPT", help="resume from this checkpoint")
    parser.add_argument("--fresh", action="store_true", help="start over")
    parser.add_argument("--replan", action="store_true", help="resume with another schedule")
    parser.add_argument("--force", action="store_true", help="start even if the plan says that it does not fit")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="config keys to set")
    given = parser.parse_args(arguments)
    words = ["train", given.config, *given.overrides]
    for key in ("wandb_project", "wandb_name", "epochs", "devices", "num_nodes"):
        value = getattr(given, key)
        if value is not None and not (given.no_wandb and key.startswith("wandb")):
            words.append(f"{key}={value}")
    if given.no_wandb:
        words += ["wandb=false", "wandb_project=null"]
    if given.resume:
        words += ["--resume", given.resume]
    words += [f"--{flag}" for flag in ("fresh", "replan", "force") if getattr(given, flag)]
    return words


if __name__ == "__main__":
    sys.exit(main(arguments_for_stoker(sys.argv[1:])))
