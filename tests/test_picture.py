"""The README's picture is an SVG that shows a screen of the doctor and loads nothing."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from PIL import Image
from tools.picture import COMMAND, PICTURE, draw, write_images

MOST_BYTES = 300_000


def _text_of(svg: str) -> str:
    root = ElementTree.fromstring(svg)
    found = "".join(text for element in root.iter() if element.tag.endswith("}text") for text in element.itertext())
    return found.replace("\xa0", " ")


def test_the_picture_in_the_repository_shows_a_verdict_and_a_speed_up() -> None:
    svg = PICTURE.read_text(encoding="utf-8")
    assert len(svg) < MOST_BYTES
    shown = _text_of(svg)
    for part in (f"$ stoker {' '.join(COMMAND)}", "verdict: ", "waiting for data", "expected speed-up"):
        assert part in shown


def test_a_drawn_screen_keeps_every_character_and_loads_nothing() -> None:
    screen = "$ stoker doctor x\nverdict: too few workers\n  ░░░███▓ <b>&amp;</b> 1.9x (1.8-2.1)\n"
    svg = draw(screen)
    assert _text_of(svg).split() == screen.split()
    assert svg.count("http") == svg.count('xmlns="http://www.w3.org/2000/svg"') == 1


def test_the_generated_images_are_class_folders_of_the_size_of_imagenets(tmp_path: Path) -> None:
    write_images(tmp_path / "images", {"train": 1, "val": 1}, copies=2)
    files = sorted((tmp_path / "images" / "train").rglob("*.jpg"))
    assert len(files) == 2 * len(list((tmp_path / "images" / "train").iterdir()))
    with Image.open(files[0]) as image:
        assert image.size == (500, 375)
    assert 40_000 < files[0].stat().st_size < 200_000
