"""`stoker export`: a checkpoint's model as a file for other programs, which appears only once its output is checked."""

from __future__ import annotations

import copy
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker import __version__
from stoker.core.console import Answer
from stoker.core.errors import UserError
from stoker.core.files import sync_folder, use_umask
from stoker.core.units import size_text
from stoker.train.checkpoint.weights import load_weights

Metadata = Mapping[str, object]
Runner = Callable[[Tensor], Tensor]
# protobuf's limit is 2 GiB; the graph needs some room besides the weights.
LARGEST_ONNX_WEIGHTS = 1_900_000_000
METADATA_FILE = "metadata.json"
CPU = torch.device("cpu")
# Other kernels sum in another order: 1e-6 of the largest logit is usual. A wrong layer differs by far more.
RELATIVE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Exportable:
    """A network to export, and what its file is checked with."""

    name: str
    """Name of its architecture."""
    model: nn.Module
    input_name: str
    inputs: Mapping[str, Tensor]
    """Batches to compare the outputs on, on the CPU, by description; only their size differs."""
    metadata: Metadata
    path: Path
    """The checkpoint's file."""

    @property
    def example(self) -> Tensor:
        """A batch of two: torch would treat a batch size of one as a constant."""
        first = next(iter(self.inputs.values()))
        return torch.randn(2, *first.shape[1:])


def exportable(
    trained: Any, input_name: str, shape: Sequence[int], counts: Sequence[int], about: Metadata,
    real: tuple[str, Tensor] | None,
) -> Exportable:  # fmt: skip
    """The network of a task's trained model, compared on random batches of so many samples, and on a real one if there
    is one. `about` is what programs need to know besides what applies to every task."""
    generator = torch.Generator().manual_seed(0)
    inputs = {f"random batch of {count}": torch.randn(count, *shape, generator=generator) for count in counts}
    metadata = {
        "model": trained.config.model,
        **about,
        "weights": "averaged" if trained.averaged else "raw",
        "epoch": trained.epoch,
        "step": trained.step,
        "stoker": __version__,
    }
    inputs |= () if real is None else [real]
    return Exportable(trained.config.model, trained.model, input_name, inputs, metadata, trained.path)


@dataclass(frozen=True)
class ExportFormat:
    """How a format is written, and loaded again to be checked."""

    write: Callable[[Exportable, nn.Module, Path], None]
    """Takes what is exported, a copy of its model to work on, and the path."""
    load: Callable[[Path, Exportable, nn.Module], tuple[Runner, str]]
    """The file as a function, and what loaded it; the model gives the architecture, and may be changed."""
    packages: tuple[str, ...] = ()

    def check_packages(self) -> None:
        missing = []
        for name in self.packages:
            try:
                import_module(name)
            except ImportError:
                missing.append(name)
        if missing:
            raise UserError(
                "package-missing",
                f"this format needs {' and '.join(missing)}, which is not installed",
                hint="pip install 'stoker[export]'",
            )


def _write_safetensors(subject: Exportable, model: nn.Module, path: Path) -> None:
    # Copied, because the format refuses tensors that share memory.
    tensors = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in subject.metadata.items()}
    save_file(tensors, path, metadata={"format": "pt", **texts})


def _load_safetensors(path: Path, _subject: Exportable, model: nn.Module) -> tuple[Runner, str]:
    # Tensors that the file does not fill stay NaN, which is noticed.
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.fill_(float("nan"))
    load_weights(model, path)
    return _without_gradients(model), "safetensors"


def _write_torch_export(subject: Exportable, model: nn.Module, path: Path) -> None:
    with _quiet():
        program = torch.export.export(model, (subject.example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, path, extra_files={METADATA_FILE: json.dumps(dict(subject.metadata))})


def _load_torch_export(path: Path, _subject: Exportable, _model: nn.Module) -> tuple[Runner, str]:
    with _quiet():
        module = torch.export.load(path).module()
    return _without_gradients(module), f"torch.export of torch {torch.__version__}"


def _write_onnx(subject: Exportable, model: nn.Module, path: Path) -> None:
    size = sum(value.nbytes for value in model.state_dict().values())
    if size > LARGEST_ONNX_WEIGHTS:
        raise UserError(
            "too-large-for-onnx",
            f"the model has {size_text(size)} of weights",
            why="an ONNX file holds at most 2 GB",
            hint="--to torch-export",
        )
    with _quiet():
        program = torch.onnx.export(
            model, (subject.example,), dynamo=True, input_names=[subject.input_name], output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False,
        )  # fmt: skip
        assert program is not None
        for key, value in subject.metadata.items():
            program.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value)
        program.save(path, external_data=False)


def _load_onnx(path: Path, subject: Exportable, _model: nn.Module) -> tuple[Runner, str]:
    session: Any
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        name = f"onnxruntime {onnxruntime.__version__}"
    except ImportError:
        import onnx
        from onnx.reference import ReferenceEvaluator

        onnx.checker.check_model(str(path), full_check=True)
        session = ReferenceEvaluator(str(path))
        name = f"the reference of onnx {onnx.__version__}"
    return lambda inputs: torch.from_numpy(session.run(["logits"], {subject.input_name: inputs.numpy()})[0]), name


def _without_gradients(module: nn.Module) -> Runner:
    def run(inputs: Tensor) -> Tensor:
        with torch.inference_mode():
            result: Tensor = module(inputs)
        return result

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch's progress reports off stdout, where our result goes, and its advice to developers off stderr."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


FORMATS = {
    "safetensors": ExportFormat(_write_safetensors, _load_safetensors),
    "onnx": ExportFormat(_write_onnx, _load_onnx, packages=("onnx", "onnxscript")),
    "torch-export": ExportFormat(_write_torch_export, _load_torch_export),
}


@dataclass(frozen=True)
class OutputDifference:
    """How much an exported model's output differs from the checkpoint's."""

    what: str
    """The inputs, in words."""
    max_abs: float
    tolerance: float

    @property
    def is_too_large(self) -> bool:
        return not self.max_abs <= self.tolerance  # also if it is NaN


def export_model(subject: Exportable, to: str, out: Path) -> Answer:
    """Writes the model in one of FORMATS, after `check_can_export`; the file takes a batch of any size."""
    chosen = FORMATS[to]
    model = copy.deepcopy(subject.model).to(CPU, memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    original = subject.model.to(CPU)
    with torch.inference_mode():
        wanted = [original(inputs) for inputs in subject.inputs.values()]
    with _appearing(out) as unchecked:
        with _naming_the_model("written as", subject, to):
            chosen.write(subject, model, unchecked)
        with _naming_the_model("loaded again from", subject, to):
            run, checked_with = chosen.load(unchecked, subject, copy.deepcopy(subject.model))
            found = [
                _difference(what, run, inputs, logits)
                for (what, inputs), logits in zip(subject.inputs.items(), wanted, strict=True)
            ]
        if wrong := [one for one in found if one.is_too_large]:
            raise UserError(
                "export-differs",
                f"{subject.name} as {to}: {wrong[0].what} differs by {wrong[0].max_abs:.3g} from the "
                f"checkpoint's output; {wrong[0].tolerance:.2g} is allowed",
                why=f"the file would give other answers than the checkpoint, so it was removed (run by {checked_with})",
                hint=None if to == "safetensors" else "--to safetensors writes the weights unchanged",
            )
    size = out.stat().st_size
    document = {
        "checkpoint": str(subject.path),
        "weights": subject.metadata["weights"],
        "out": str(out),
        "format": to,
        "bytes": size,
        "checked_with": checked_with,
        "differences": [{"images": one.what, "max_abs": one.max_abs, "tolerance": one.tolerance} for one in found],
    }
    lines = [f"{out}: {size_text(size)}, loaded again with {checked_with}"]
    lines += [f"  {one.what}: largest difference {one.max_abs:.2g} (allowed {one.tolerance:.2g})" for one in found]
    return Answer("\n".join(lines), document)


@contextmanager
def _naming_the_model(what: str, subject: Exportable, to: str) -> Iterator[None]:
    """Turns any error of torch or ONNX, which may be of any type, into one that names the architecture and format."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        raise UserError(
            "export-failed",
            f"{subject.name} cannot be {what} {to}: {type(error).__name__}: {line[:300]}",
            why="not every architecture can be exported with a variable batch size",
            hint=None if to == "safetensors" else "--to safetensors works with every architecture",
        ) from error


def _difference(what: str, run: Runner, inputs: Tensor, wanted: Tensor) -> OutputDifference:
    got = run(inputs)
    same_shape = got.shape == wanted.shape
    largest = float((got - wanted).abs().max()) if same_shape else float("nan")
    return OutputDifference(what, largest, RELATIVE_TOLERANCE * max(1.0, float(wanted.abs().max())))


def check_can_export(to: str, out: Path, force: bool) -> None:
    """Raises if the export cannot succeed, before any long work."""
    FORMATS[to].check_packages()
    if out.is_dir():
        raise UserError("out-is-folder", f"{out} is a folder", hint=f"{out}/model.onnx, or another file name")
    if out.exists() and not force:
        raise UserError("out-exists", f"{out} exists already", hint="--force replaces it")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A path to write to; the file moves to `out` if the block succeeds, and is removed otherwise."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".stoker-export-", dir=out.parent) as folder:
            # torch insists on a suffix.
            unchecked = Path(folder) / f"model{out.suffix if out.suffix else '.bin'}"
            yield unchecked
            use_umask(unchecked)
            unchecked.replace(out)
        sync_folder(out.parent)
    except OSError as error:
        raise UserError(
            "out-not-writable", f"{out} cannot be written: {error.strerror or error}", hint="another OUT"
        ) from error
