"""Reads one YAML file into keys, values and line numbers; refuses anything but plain data.

YAML 1.2 rules for scalars: `5e-3` is a number, `1:30` is text (not ninety), `010` is ten.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stoker.core.errors import ConfigError, config_problem, nearest
from stoker.core.finding import Finding
from stoker.core.units import size_text

WEIGHTS = (".ckpt", ".pt", ".pth", ".safetensors", ".bin", ".tar")
_MODEL_NAME = re.compile(r"[a-z][a-z0-9_.]*")
# Shipped configs have at most 2 KB; a file of more than a megabyte is not a config.
MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 16
MAX_NODES = 20_000


@dataclass(frozen=True)
class Entry:
    """One `key: value` of a file, with its section removed."""

    key: str
    value: Any
    line: int
    sections: tuple[str, ...] = ()
    """The sections around it, outermost first."""


@dataclass
class YamlFile:
    """The entries of a file, and its problems."""

    path: Path
    entries: list[Entry] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    def where(self, line: int) -> str:
        return f"{self.path}:{line}"


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 and nothing else."""


_CoreLoader.yaml_implicit_resolvers = {}
_FLOAT = (
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
for _tag, _pattern, _first_letters in [
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
]:
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first_letters)


def _construct_int(_loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def read_yaml_file(path: Path, known_keys: frozenset[str], section_names: frozenset[str]) -> YamlFile:
    """The file's entries in order; raises ConfigError if it is not a readable YAML mapping."""
    found = YamlFile(path)
    text = _read_text(path)
    try:
        loader = _CoreLoader(text)  # checks for unprintable characters right away
    except yaml.YAMLError as error:
        raise _syntax_error(path, error) from None
    try:
        root = loader.get_single_node()
        if root is None:
            return found  # an empty file changes nothing
        if not isinstance(root, yaml.MappingNode):
            kind = "list" if isinstance(root, yaml.SequenceNode) else "single value"
            raise ConfigError(
                f"{path} contains a {kind}, not `key: value` lines",
                name="config-not-a-mapping",
                hint="stoker config keys    # lists every key",
            )
        _Walk(loader, found, known_keys, section_names).mapping(root)
    except yaml.YAMLError as error:
        raise _syntax_error(path, error) from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a config", name="config-unreadable") from None
    finally:
        loader.dispose()
    return found


def parse_value(text: str) -> Any:
    """Parses one value as YAML would; used for KEY=VALUE on the command line."""
    loader = _CoreLoader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


class _Walk:
    """Flattens sections and records every key with its line."""

    def __init__(self, loader: Any, found: YamlFile, known: frozenset[str], sections: frozenset[str]) -> None:
        self.loader = loader
        self.found = found
        self.known = known
        self.sections = sections
        self.nodes = 0

    def mapping(self, node: yaml.MappingNode, sections: tuple[str, ...] = ()) -> None:
        # Anchors may point back at their own ancestors, so the file's size does not bound the walk.
        if len(sections) > MAX_DEPTH:
            raise ConfigError(f"{self.found.path} is nested too deeply to be a config", name="config-unreadable")
        for key_node, value_node in node.value:
            self.nodes += 1
            if self.nodes > MAX_NODES:
                raise ConfigError(f"{self.found.path} has more than {MAX_NODES} entries", name="config-unreadable")
            self.entry(key_node, value_node, sections)

    def entry(self, key_node: yaml.Node, value_node: yaml.Node, sections: tuple[str, ...]) -> None:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            self.problem(("?",), "a key must be a single word", line)
            return
        key = key_node.value
        if isinstance(value_node, yaml.MappingNode):
            # No key takes a mapping, so this is a section, even under a key's name (`model:`).
            self.mapping(value_node, (*sections, key))
            return
        try:
            value = self.loader.construct_object(value_node, deep=True)
        except yaml.constructor.ConstructorError:
            self.problem((key,), f"{value_node.tag} is refused: a config contains only plain data, not objects", line)
            return
        except (ValueError, OverflowError, RecursionError) as error:
            self.problem((key,), f"cannot be parsed ({error})", line)
            return
        if value is None and key in self.sections and key not in self.known:
            return  # a section whose lines are all commented out
        self.found.entries.append(Entry(key, value, line, sections))

    def problem(self, keys: tuple[str, ...], message: str, line: int) -> None:
        self.found.problems.append(config_problem(keys, message, self.found.where(line)))


def _read_text(path: Path) -> str:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ConfigError(
                f"{path} is a folder, not a config file", name="config-not-a-file", hint=_instead_of_folder(path)
            )
        size = status.st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} has {size_text(size)}; configs have a few kilobytes",
                name="config-too-large",
                why="it is probably a data file, named by mistake",
                hint=_weights(path),
            )
        # A pipe or a device has no size: never read more than the cap.
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", name="config-unreadable", hint=f"ls -l {path}"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not valid UTF-8"
        raise ConfigError(f"{path} is not text: {reason}", name="config-not-text", hint=_weights(path)) from None
    if "\0" in text:
        raise ConfigError(f"{path} is not text: it contains NUL bytes", name="config-not-text", hint=_weights(path))
    return text


def _instead_of_folder(path: Path) -> str:
    """What was probably meant by a folder."""
    if any(path.glob("*.y*ml")) and not (path / "metrics.jsonl").exists():
        return f"ls {path}/*.yaml"
    if (path / "metrics.jsonl").exists():
        return f"the command that began this run resumes it; `stoker report {path}` shows it"
    return f"CONFIG data_root={path}, if that is your data: a config says how to train, data_root on what"


def _weights(path: Path) -> str | None:
    if path.suffix not in WEIGHTS:
        return None
    return f"CONFIG --resume {path} continues its run; CONFIG --from {path} begins another with its weights"


def _missing(path: Path) -> ConfigError:
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if folder != path.parent:
        return ConfigError(
            f"{path} does not exist, and neither does its folder", name="config-missing", hint=f"ls {folder}"
        )
    names = [file.name for file in folder.glob("*.y*ml")]
    similar = nearest(path.name, names)
    hint = f"did you mean {folder / similar}?" if similar else f"ls {folder}/*.yaml"
    if not similar and _MODEL_NAME.fullmatch(str(path)):
        hint = f"CONFIG model={path}, if that is a network; {hint}"
    return ConfigError(f"{path} does not exist", name="config-missing", hint=hint)


def _syntax_error(path: Path, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    if "'\\t'" in reason:
        reason = "found a tab; YAML is indented with spaces"
    elif "expected a single document" in str(error):
        reason = "found a second document (`---`); a config is a single document"
    elif isinstance(error, yaml.reader.ReaderError):
        reason = f"it contains an unprintable character, number {error.character}"
    return ConfigError(f"{where}: {reason}", name="config-not-yaml")
