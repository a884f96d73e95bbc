"""Places in a command line: what is tuned, from which value on, and what is refused."""

from __future__ import annotations

import pytest

from stoker.core.errors import UsageError
from stoker.tune.script import read_template


def test_values_are_filled_in_wherever_the_places_are() -> None:
    template = read_template(
        ["python", "train.py", "-j{num_workers}", "--batch-size={batch_size=64}", "-lr", "{batch_size}e-4"]
    )
    assert template.start == {"num_workers": 0, "batch_size": 64}
    assert template.filled({"num_workers": 4, "batch_size": 128}) == [
        "python", "train.py", "-j4", "--batch-size=128", "-lr", "128e-4"
    ]  # fmt: skip
    assert template.line({"num_workers": 4, "batch_size": 128}) == "python train.py -j4 --batch-size=128 -lr 128e-4"


def test_an_empty_value_leaves_its_word_out_and_other_braces_stay() -> None:
    json = '{"lr": 0.1, "inner": {"a": {}}}'
    template = read_template(["python", "t.py", "{pin=|--pin-memory}", "--x", json, "", "{{num_workers}}", "{}"])
    assert template.filled({"pin": ""}) == ["python", "t.py", "--x", json, "", "{num_workers}", "{}"]
    assert template.filled({"pin": "--pin-memory"})[2] == "--pin-memory"


def test_a_start_that_nobody_named_is_dataloaders_own_and_is_said() -> None:
    template = read_template(["t", "{num-workers}"])
    (note,) = template.notes()
    assert "starting from 0, DataLoader's default" in note
    assert read_template(["t", "{num_workers=0}"]).notes() == []
    # DataLoader refuses prefetch_factor without workers.
    both = read_template(["t", "{num_workers}", "{prefetch_factor}"])
    assert both.start == {"num_workers": 1, "prefetch_factor": 2}


@pytest.mark.parametrize(
    ("words", "name", "hint"),
    [
        ([], "no-command", "{num_workers}"),
        (["python", "my train.py", "-j", "8"], "no-placeholder", "python 'my train.py' -j {num_workers=8}"),
        (["python", "t.py", "--num-workers=6"], "no-placeholder", "t.py --num-workers={num_workers=6}"),
        (["python", "t.py"], "no-placeholder", "python t.py -j {num_workers=4}"),
        (["t", "{batch_size}"], "placeholder-without-start", "{batch_size=64}"),
        (["t", "{num_worker}"], "placeholder-without-values", "{num_workers}"),
        (["t", "{decoder=pil}"], "placeholder-without-values", "'{decoder=pil|cv2}'"),
        (["t", "{decoder=pil"], "placeholder-not-closed", "quote it"),
        (["t", "{num_workers=many}"], "placeholder-not-a-number", "{num_workers=4}"),
        (["t", "{batch_size=0}"], "placeholder-not-a-number", "{batch_size=4}"),
        (["t", "{num_workers=2}", "{num_workers=4}"], "placeholder-twice", "{num_workers}"),
        (["t", "{decoder=pil|pil}"], "placeholder-value-twice", None),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_what_to_type(words: list[str], name: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        read_template(words)
    assert caught.value.name == name
    assert hint is None or hint in str(caught.value.hint)
