"""What many commands take: a config, overrides, `--json`; how torch's threads wait."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

# What many commands take: a config, overrides, `--json`.

ConfigArgument = Annotated[
    Path,
    # Whether it can be read is for the config's own error to say.
    typer.Argument(
        metavar="CONFIG", readable=False, help="Config file, for example configs/demo.yaml.", show_default=False
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Keys to set on top of the file: lr=0.1 epochs=2.", show_default=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="The same, as an option; may be repeated.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")]
CheckpointArgument = Annotated[
    Path,
    # Whether it can be read is for the checkpoint's own error to say.
    typer.Argument(
        metavar="CKPT",
        readable=False,
        help="Checkpoint of `stoker train`, or a run folder: its best one.",
        show_default=False,
    ),
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Take the weights themselves where the checkpoint also has their average (EMA).")
]


# How torch's own threads wait for each other, to be said before torch is loaded.


def let_threads_sleep() -> None:
    """Threads of OpenMP sleep while they wait, unless the user says otherwise.

    By default they spin, and take the cores from the loader: on two cores that others use too, the same training
    took 142 s so, and 20 s with sleeping threads.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
