"""The formats of `stoker export`: how each is written, and loaded again to be checked."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker.errors import UserError
from stoker.models.weights import load_weights

Metadata = Mapping[str, object]
Runner = Callable[[Tensor], Tensor]
# protobuf's limit is 2 GiB; the graph needs some room besides the weights.
LARGEST_ONNX_WEIGHTS = 1_900_000_000
METADATA_FILE = "metadata.json"


@dataclass(frozen=True)
class Format:
    """How one format is written and read."""

    write: Callable[[nn.Module, Path, Tensor, Metadata], None]
    """model, path, example batch, metadata."""
    load: Callable[[Path, nn.Module], tuple[Runner, str]]
    """The file as a function, and by what it was loaded; the model is for its architecture, and may be changed."""
    packages: tuple[str, ...] = ()

    def check_packages(self) -> None:
        """Refuses to begin where a package is missing."""
        missing = []
        for name in self.packages:
            try:
                import_module(name)
            except ImportError:
                missing.append(name)
        if missing:
            raise UserError(
                "package-missing",
                f"this format needs {' and '.join(missing)}, not installed here",
                hint="pip install 'stoker[export]'",
            )


def _write_safetensors(model: nn.Module, path: Path, _example: Tensor, metadata: Metadata) -> None:
    # Copies: the format refuses tensors that share memory.
    tensors = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    save_file(tensors, path, metadata={"format": "pt", **texts})


def _load_safetensors(path: Path, model: nn.Module) -> tuple[Runner, str]:
    # What the file does not fill stays no number, and is noticed.
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.fill_(float("nan"))
    load_weights(model, path)
    return _without_gradients(model), "safetensors"


def _write_torch_export(model: nn.Module, path: Path, example: Tensor, metadata: Metadata) -> None:
    with _quiet():
        program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, path, extra_files={METADATA_FILE: json.dumps(dict(metadata))})


def _load_torch_export(path: Path, _model: nn.Module) -> tuple[Runner, str]:
    with _quiet():
        module = torch.export.load(path).module()
    return _without_gradients(module), f"torch.export of torch {torch.__version__}"


def _write_onnx(model: nn.Module, path: Path, example: Tensor, metadata: Metadata) -> None:
    size = sum(value.nbytes for value in model.state_dict().values())
    if size > LARGEST_ONNX_WEIGHTS:
        raise UserError(
            "too-large-for-onnx",
            f"the model has {size / 1e9:.1f} GB of weights",
            why="an ONNX file holds at most 2 GB",
            hint="--to torch-export",
        )
    with _quiet():
        program = torch.onnx.export(
            model, (example,), dynamo=True, input_names=["images"], output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False,
        )  # fmt: skip
        assert program is not None
        for key, value in metadata.items():
            program.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value)
        program.save(path, external_data=False)


def _load_onnx(path: Path, _model: nn.Module) -> tuple[Runner, str]:
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
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0]), name


def _without_gradients(module: nn.Module) -> Runner:
    def run(images: Tensor) -> Tensor:
        with torch.inference_mode():
            result: Tensor = module(images)
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
    "safetensors": Format(_write_safetensors, _load_safetensors),
    "onnx": Format(_write_onnx, _load_onnx, packages=("onnx", "onnxscript")),
    "torch-export": Format(_write_torch_export, _load_torch_export),
}
