"""What a script does with patched functions besides calling them works as without timers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.waiting import DEADLINE_S

PROGRAM = """
import copy, io, pickle, sys
from stoker.attach.session import start
start(sys.argv[1])
import torch, torchvision, PIL.Image, numpy, cv2
from torchvision.io import decode_jpeg

def decode(data: torch.Tensor):
    return decode_jpeg(data)

torch.jit.script(decode)
assert pickle.loads(pickle.dumps(decode_jpeg)) is decode_jpeg
assert pickle.loads(pickle.dumps(numpy.load)) is numpy.load

class Files(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        with open(sys.argv[2], "rb") as stream:
            assert type(stream) is io.BufferedReader
            start = stream.read(3)
            assert stream.seek(0) == 0 and start + stream.read()[3:] == b"0123456789" * 1000
        with open(sys.argv[2]) as text:
            assert text.read(3) == "012"
        return torch.zeros(8)

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(optimizer.step, backend="eager")
loader = torch.utils.data.DataLoader(Files(), batch_size=2)
copy.deepcopy(loader)
for inputs in loader:
    model(inputs).sum().backward()
    step()
assert pickle.loads(pickle.dumps(open)) is open
assert loader.dataset.__class__ is Files
"""


def test_scripting_compiling_pickling_and_reading(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"0123456789" * 1000)
    records = tmp_path / "records"
    records.mkdir()
    program = tmp_path / "program.py"  # TorchScript reads the source
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(records), str(text)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert not any("note" in path.read_text() for path in records.glob("about-*.jsonl"))
