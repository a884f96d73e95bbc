"""`stoker config`: the resolved config, the key reference, a schema for editors."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from stoker.commands.options import ConfigArgument, JsonOption, OverridesArgument, SetOption

group = typer.Typer(
    help="Show a resolved config, the key reference, or a JSON schema for editors.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="config")


@group.command(epilog="Example: stoker config show configs/rsb_a2.yaml epochs=100 batch_size=128")
def show(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    set_: SetOption = None,
    json: JsonOption = False,
) -> int:
    """Print every key with its value and origin, or every problem of the config."""
    from stoker.config import config_values
    from stoker.config.reading import load_for_command
    from stoker.config.reference import config_with_origins
    from stoker.console import print_json, print_result, say_notes
    from stoker.machine.host import fit_to_machine, read_machine
    from stoker.run.folder import run_folder_for

    resolved = load_for_command(config, overrides, set_)
    _, notes = fit_to_machine(resolved.config, read_machine())
    if json:
        print_json(
            {
                "config": config_values(resolved.config),
                "origins": resolved.origins,
                "run_folder": str(run_folder_for(resolved.config, config).root),
                "warnings": list(resolved.warnings),
                "notes": [*resolved.notes, *notes],
            }
        )
        return 0
    print_result(config_with_origins(resolved))
    say_notes(notes)
    return 0


@group.command(epilog="Example: stoker config keys lr batch_size")
def keys(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="Only these keys.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> int:
    """Print the type, default, unit and meaning of every key."""
    from stoker.config.reference import key_reference, key_references
    from stoker.console import print_json, print_result

    references = key_references(names)
    if json:
        print_json({reference.name: asdict(reference) for reference in references})
    else:
        print_result(key_reference(references))
    return 0


@group.command(epilog="Example: stoker config schema > stoker.schema.json")
def schema(json: JsonOption = True) -> int:  # noqa: ARG001 - a schema is always JSON
    """Print a JSON schema for completion and validation of config files in an editor."""
    from stoker.config.reference import editor_schema
    from stoker.console import print_json

    print_json(editor_schema())
    return 0
