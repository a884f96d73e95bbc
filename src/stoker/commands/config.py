"""`stoker config`: the resolved config, the key reference, a schema for editors, import from other programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import Argument, ConfigArgument, JsonOption, OverridesArgument

group = typer.Typer(
    help="Show a resolved config, the key reference or a JSON schema for editors; import another program's config.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="config")


@group.command(epilog="Example: stoker config show configs/rsb_a2.yaml epochs=100 batch_size=128")
def show(config: ConfigArgument, overrides: OverridesArgument = None, json: JsonOption = False) -> int:
    """Print every key with its value and origin, or every problem of the config."""
    from stoker.config import config_as_yaml, config_values
    from stoker.config.reading import load_for_command
    from stoker.core.console import print_json, print_result, say_notes
    from stoker.profile.host import fit_to_machine, read_machine
    from stoker.run.folder import run_folder_for

    resolved = load_for_command(config, overrides)
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
    print_result(config_as_yaml(resolved.config, origins=resolved.origins).rstrip())
    say_notes(notes)
    return 0


@group.command(epilog="Example: stoker config keys lr batch_size")
def keys(
    names: Annotated[list[str] | None, Argument(metavar="[KEY]...", help="Only these keys.")] = None,
    json: JsonOption = False,
) -> int:
    """Print the type, default, unit and meaning of every key."""
    from stoker.config.reference import key_reference, key_references
    from stoker.core.console import Answer, print_answer

    references = key_references(names)
    document = {reference.name: asdict(reference) for reference in references}
    return print_answer(Answer(key_reference(references), document), as_json=json)


@group.command(epilog="Example: stoker config schema > stoker.schema.json")
def schema(json: JsonOption = True) -> int:  # noqa: ARG001 - a schema is always JSON
    """Print a JSON schema for completion and validation of config files in an editor."""
    from stoker.config.reference import editor_schema
    from stoker.core.console import print_json

    print_json(editor_schema())
    return 0


@group.command("import", epilog="Example: stoker config import args.yaml -o configs/ours.yaml")
def import_(
    source: Annotated[Path, Argument(metavar="THEIRS", readable=False, help="Config of another program, as YAML.")],
    overrides: Annotated[
        list[str] | None,
        Argument(metavar="KEY=VALUE", help="Settings of stoker that the file does not say, such as devices=8."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OURS", help="File to write; default: print it.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File whose keys the other program reads first.")
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="PROGRAM", help="lightning, timm, torchvision or names; default: recognised by the keys."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OURS if it exists.")] = False,
    accept: Annotated[bool, typer.Option("--accept", help="Go on without the keys that cannot be kept.")] = False,
    json: JsonOption = False,
) -> int:
    """Translate another program's config, with a comment for each key: what it became, and why."""
    from stoker.config import load_config
    from stoker.config.importing.translate import (
        check_kept,
        check_output,
        check_program,
        import_config,
        import_notes,
        imported_as_yaml,
        summary,
        write_import,
    )
    from stoker.core.console import print_json, print_result, say_notes

    check_program(program)
    check_output(output, source, force=force)
    given = load_config(None, overrides or ())
    settings = {key: getattr(given.config, key) for key in given.origins}
    imported = import_config(source, base=base, program_name=program, given=settings)
    if not accept:
        check_kept(imported)
    text = imported_as_yaml(imported)
    if output is not None:
        write_import(output, text)
    if json:
        print_json(summary(imported) | {"output": str(output) if output else None, "text": text})
    elif output is None:
        print_result(text)
    say_notes(import_notes(imported, output))
    return 0
