"""Draws the README's picture: what `stoker doctor` prints on this machine, as an SVG.

The images are generated, of the size of ImageNet's, and a consumer of a GPU's speed replaces the model, so that it
works in a fresh clone without data and without a GPU.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

PROJECT = Path(__file__).parents[1]
PICTURE = PROJECT / "docs" / "images" / "doctor.svg"
COMMAND = ("doctor", "configs/single_gpu_full.yaml", "data_root=images", "num_workers=1", "--pace", "a100-40")
CLASSES, PER_CLASS = 4, {"train": 64, "val": 4}
# Hard links to each file: an epoch of one step would be all start-up.
COPIES = 24
# The mean size of ImageNet's files is 400 x 350; 500 x 375 is the most frequent one.
WIDTH, HEIGHT, QUALITY = 500, 375, 90
COLUMNS = 100
DARK = TerminalTheme(
    (22, 27, 34),
    (201, 209, 217),
    [(72, 79, 88), (255, 123, 114), (86, 211, 100), (227, 179, 65), (121, 192, 255), (188, 140, 255), (86, 212, 221),
     (177, 186, 196)],
)  # fmt: skip
STYLES = (
    (r"^\$ .*", "bold"),
    (r"^verdict: .*", "bold yellow"),
    (r"░+", "yellow"),
    (r"█+", "green"),
    (r"▓+", "blue"),
    (r"\benough\b", "green"),
    (r"\d+% of [\d,]+ \S+", "yellow"),
    (r"\d\.\dx \(.*?\)", "bold green"),
    (r"^(note|not measured|not included).*", "dim"),
)
"""What to colour: pattern and style."""
SVG = """\
<svg viewBox="0 0 {width} {height}" width="{width}" xmlns="http://www.w3.org/2000/svg">
<style>
text {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px; }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>
<g transform="translate(14, 12)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Without rich's window frame and without its fonts, which a page would have to fetch from a server."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=PICTURE, help="SVG file to write")
    target = parser.parse_args().to.absolute()
    with tempfile.TemporaryDirectory(prefix="stoker-picture-") as name:
        folder = Path(name)
        write_images(folder / "images", PER_CLASS, COPIES)
        (folder / "configs").symlink_to(PROJECT / "configs")
        done = subprocess.run(
            [sys.executable, "-m", "stoker", *COMMAND], cwd=folder, text=True, stdout=subprocess.PIPE, check=True
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(draw(f"$ stoker {' '.join(COMMAND)}\n{done.stdout}"), encoding="utf-8")
    sys.stdout.write(f"{done.stdout}\nwrote {target}\n")
    return 0


def write_images(root: Path, per_class: Mapping[str, int], copies: int) -> None:
    """Class folders of JPEGs that take about as long to decode as photographs."""
    random = np.random.default_rng(0)
    for split, count in per_class.items():
        for label in range(CLASSES):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                path = folder / f"{number:03d}.jpg"
                _photograph(random).save(path, quality=QUALITY)
                for copy in range(1, copies):
                    path.with_stem(f"{path.stem}-{copy}").hardlink_to(path)


def _photograph(random: np.random.Generator) -> Image.Image:
    """Noise at several scales, like the shapes and textures of a photograph."""
    pixels = np.full((HEIGHT, WIDTH, 3), 128.0)
    for side, strength in ((4, 50), (16, 30), (64, 20), (256, 12)):
        coarse = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
        layer = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        pixels += (np.asarray(layer, np.float32) - 128) * strength / 50
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def draw(text: str) -> str:
    """The text as an SVG of a terminal."""
    screen = Text(text.strip("\n"))
    for pattern, style in STYLES:
        screen.highlight_regex(f"(?m){pattern}", style)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(screen)
    return console.export_svg(theme=DARK, code_format=SVG, unique_id="doctor")


if __name__ == "__main__":
    sys.exit(main())
