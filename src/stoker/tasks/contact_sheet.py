"""Contact sheets: pictures with captions in a grid, read at a glance, such as the preview of a run's first samples.

A picture keeps its pixels: small ones are enlarged by a whole factor without smoothing, and only pictures that would
not fit beside each other on a screen are reduced.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from stoker.core.console import Say
from stoker.core.files import write_bytes
from stoker.tasks.base import Task

if TYPE_CHECKING:
    from stoker.profile.host import HostConfig

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Box = tuple[int, int, int, int]
COLUMNS = 6
LARGEST_SIDE = 224
"""Six of these side by side, with the gaps between them, fit a screen of 1440 px."""
NARROWEST_CELL = 190
"""A caption needs this much, even below a smaller picture."""
MARGIN, GAP = 20, 10
PAPER, INK, SOFT, LINE = "#ffffff", "#1d1b18", "#6a655d", "#d8d3c8"
TITLE_SIZE, HEADING_SIZE, TEXT_SIZE, SMALL_SIZE = 19, 16, 12, 11
LEADING = 1.34
ELLIPSIS = "…"
JPEG_QUALITIES = (88, 78, 65, 50, 35)
# The preview that a run keeps.
RUN_PATIENCE_S = 1.0
RUN_LARGEST_SIDE = 160
RUN_MOST_BYTES = 250_000


@dataclass(frozen=True)
class Picture:
    """A square of pixels and the lines below it."""

    pixels: NDArray[np.uint8]
    caption: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    """Further lines, in grey."""


@dataclass(frozen=True)
class SheetRow:
    """Pictures that belong together; a long row takes several lines of the sheet."""

    pictures: tuple[Picture, ...]
    title: str = ""


@dataclass(frozen=True)
class SheetSection:
    """A heading, what applies to all its pictures, and the pictures."""

    title: str
    notes: tuple[str, ...] = ()
    rows: tuple[SheetRow, ...] = ()


@dataclass(frozen=True)
class Sheet:
    title: str
    notes: tuple[str, ...] = ()
    sections: tuple[SheetSection, ...] = ()


@dataclass(frozen=True)
class Drawn:
    image: Image.Image
    boxes: tuple[Box, ...]
    """Where each picture is: left, top, right, bottom, in the order of the sheet."""

    def as_png(self) -> bytes:
        stream = io.BytesIO()
        self.image.save(stream, "PNG", compress_level=6)
        return stream.getvalue()

    def as_jpeg(self, most_bytes: int) -> bytes:
        """In the best quality that takes at most `most_bytes`, or in the lowest."""
        data = b""
        for quality in JPEG_QUALITIES:
            stream = io.BytesIO()
            # Without subsampled colours: they would smear the text.
            self.image.save(stream, "JPEG", quality=quality, subsampling=0)
            data = stream.getvalue()
            if len(data) <= most_bytes:
                break
        return data


def shown_side(side: int, largest: int = LARGEST_SIDE) -> int:
    """The side at which a picture of this size is drawn: a whole multiple of it, or `largest` if it is larger."""
    return side * max(1, largest // side) if side <= largest else largest


def draw_sheet(sheet: Sheet, largest: int = LARGEST_SIDE) -> Drawn:
    """The sheet with pictures of up to `largest` pixels."""
    sides = [shown_side(p.pixels.shape[0], largest) for s in sheet.sections for r in s.rows for p in r.pictures]
    cell = max([NARROWEST_CELL, *sides])
    width = 2 * MARGIN + COLUMNS * cell + (COLUMNS - 1) * GAP
    # The height is known once everything has been placed: the first pass only measures.
    height, _ = _place(_Pen(width, 1), sheet, cell, largest)
    pen = _Pen(width, height)
    _, boxes = _place(pen, sheet, cell, largest)
    return Drawn(pen.image, tuple(boxes))


def _place(pen: _Pen, sheet: Sheet, cell: int, largest: int) -> tuple[int, list[Box]]:
    """Draws everything, and returns the height that it takes and the places of the pictures."""
    boxes: list[Box] = []
    inside = pen.image.width - 2 * MARGIN
    y = MARGIN - 4
    y = pen.write(MARGIN, y, [fitting(sheet.title, bold(TITLE_SIZE), inside)], bold(TITLE_SIZE), INK)
    y = pen.write(MARGIN, y, wrapped(sheet.notes, regular(TEXT_SIZE), inside), regular(TEXT_SIZE), SOFT)
    for section in sheet.sections:
        y += 10
        pen.line(MARGIN, y, inside)
        y += 8
        y = pen.write(MARGIN, y, [fitting(section.title, bold(HEADING_SIZE), inside)], bold(HEADING_SIZE), INK)
        y = pen.write(MARGIN, y, wrapped(section.notes, regular(TEXT_SIZE), inside), regular(TEXT_SIZE), SOFT)
        for row in section.rows:
            y += 6
            if row.title:
                y = pen.write(MARGIN, y, [fitting(row.title, bold(TEXT_SIZE), inside)], bold(TEXT_SIZE), INK) + 2
            for first in range(0, len(row.pictures), COLUMNS):
                y = _place_line(pen, row.pictures[first : first + COLUMNS], y, cell, largest, boxes)
    return y + MARGIN - 8, boxes


def _place_line(
    pen: _Pen,
    pictures: Sequence[Picture],
    y: int,
    cell: int,
    largest: int,
    boxes: list[Box],
) -> int:
    side = max(shown_side(picture.pixels.shape[0], largest) for picture in pictures)
    end = y
    for column, picture in enumerate(pictures):
        x = MARGIN + column * (cell + GAP)
        boxes.append(pen.paste(x, y, picture.pixels, largest))
        below = y + side + 3
        captions = [fitting(text, regular(TEXT_SIZE), cell) for text in picture.caption]
        below = pen.write(x, below, captions, regular(TEXT_SIZE), INK)
        small = [fitting(text, regular(SMALL_SIZE), cell) for text in picture.small]
        end = max(end, pen.write(x, below, small, regular(SMALL_SIZE), SOFT))
    return end + 4


class _Pen:
    """Writes on a sheet; whatever is below its lower edge is measured but not visible."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width, height), PAPER)
        self._draw = ImageDraw.Draw(self.image)

    def write(self, x: int, y: int, lines: Sequence[str], font: Font, colour: str) -> int:
        """Writes lines and returns where the next one goes."""
        for text in lines:
            if y < self.image.height:
                self._draw.text((x, y), text, fill=colour, font=font)
            y += round((font.size if isinstance(font, ImageFont.FreeTypeFont) else 11.0) * LEADING)
        return y

    def line(self, x: int, y: int, width: int) -> None:
        self._draw.line((x, y, x + width, y), fill=LINE)

    def paste(self, x: int, y: int, pixels: NDArray[np.uint8], largest: int) -> Box:
        side = shown_side(pixels.shape[0], largest)
        if y < self.image.height:
            picture = Image.fromarray(np.ascontiguousarray(pixels))
            if side != pixels.shape[0]:
                enlarged = side > pixels.shape[0]
                kind = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
                picture = picture.resize((side, side), kind)
            self._draw.rectangle((x - 1, y - 1, x + side, y + side), outline=LINE)  # many pictures have a white border
            self.image.paste(picture, (x, y))
        return x, y, x + side, y + side


def fitting(text: str, font: Font, width: int) -> str:
    """The text in letters that the font has, cut with '…' if it is wider."""
    text = drawable(text, font)
    if font.getlength(text) <= width:
        return text
    fits, too_long = 0, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if font.getlength(text[:middle].rstrip() + ELLIPSIS) <= width:
            fits = middle
        else:
            too_long = middle
    return text[:fits].rstrip() + ELLIPSIS


def wrapped(texts: Sequence[str], font: Font, width: int) -> list[str]:
    """Each text on as many lines as it needs, broken at spaces."""
    lines: list[str] = []
    for text in texts:
        current = ""
        for word in drawable(text, font).split(" "):
            longer = f"{current} {word}" if current else word
            if current and font.getlength(longer) > width:
                lines.append(current)
                longer = word
            current = longer
        lines.append(fitting(current, font, width))
    return lines


def drawable(text: str, font: Font) -> str:
    """The text with the code of each letter that the font lacks: in empty boxes, all class names of an alphabet would
    look alike."""
    return "".join(
        letter if letter.isprintable() and _has_letter(font, letter) else f"\\u{ord(letter):04x}" for letter in text
    )


@functools.lru_cache(maxsize=4096)
def _has_letter(font: Font, letter: str) -> bool:
    mask, absent = font.getmask(letter), font.getmask("\uffff")
    return letter == " " or (mask.size, bytes(mask)) != (absent.size, bytes(absent))


@functools.cache
def regular(size: int) -> Font:
    return _font("DejaVuSans.ttf", size)


@functools.cache
def bold(size: int) -> Font:
    return _font("DejaVuSans-Bold.ttf", size)


def _font(name: str, size: int) -> Font:
    """DejaVu Sans, which comes with matplotlib and has most alphabets; else Pillow's own, which has English."""
    found = find_spec("matplotlib")  # which does not import it
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / name
        if file.is_file():
            return ImageFont.truetype(str(file), size)
    return ImageFont.load_default(size)


@dataclass(frozen=True)
class Preview:
    sheet: Sheet
    describe: Callable[[Sequence[Box]], dict[str, Any]]
    """The document for `--json`, from the places of the pictures on the sheet."""


@dataclass(frozen=True)
class InputRange:
    """The values that the network gets: a wrong normalisation cannot be seen once it is undone."""

    mean: float
    deviation: float
    lowest: float
    highest: float


def range_of(inputs: Tensor) -> InputRange:
    numbers = inputs.double()
    return InputRange(float(numbers.mean()), float(numbers.std()), float(numbers.min()), float(numbers.max()))


def range_text(ranges: Sequence[InputRange]) -> str:
    """The range of all inputs of a section, in words."""
    if not ranges:
        return "no sample could be read"
    mean, deviation = (float(np.mean([getattr(one, name) for one in ranges])) for name in ("mean", "deviation"))
    lowest, highest = min(one.lowest for one in ranges), max(one.highest for one in ranges)
    return f"values of these inputs: mean {mean:.2f}, deviation {deviation:.2f}, from {lowest:.2f} to {highest:.2f}"


def not_shown(unit: str) -> SheetSection:
    """The section of validation samples that there was no time to read."""
    return SheetSection("Validation", (f"Not shown: reading the training {unit} took too long already.",))


def keep_with_run(task: Task, file: Path, config: HostConfig, data: Any, world: int, say: Say) -> None:
    """Writes the preview of a run that begins into its folder, where `stoker report` finds it.

    Before the first step and by the code of `stoker preview`, not from a batch of the loop: nothing is added to the
    loop, and nothing there changes. The training samples are those that the first steps read anyway, a moment later
    and then from the page cache. It takes a few tenths of a second, and if storage is slow, stops after the first
    samples. A picture is not worth a run: any error is reported, and the run begins without it.
    """
    if type(task).preview is Task.preview:
        return
    try:
        seen = task.preview(
            config, data, file.absolute().parent.name, world=world, patience_s=RUN_PATIENCE_S, largest=RUN_LARGEST_SIDE
        )
        write_bytes(file, draw_sheet(seen.sheet, RUN_LARGEST_SIDE).as_jpeg(RUN_MOST_BYTES))
    except Exception as error:
        say(f"note: no {file.name}: {str(error) or type(error).__name__}")
