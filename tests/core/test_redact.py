"""Secrets are removed by their name and by their form; everything else stays as it is."""

from __future__ import annotations

import pytest

from stoker.core.redact import HIDDEN, redact, redact_text


@pytest.mark.parametrize(
    "text",
    [
        "s3://key:SECRETVALUE@host/bucket",
        "https://x.amazonaws.com/a?X-Amz-Signature=SECRETVALUE&X-Amz-Date=2",
        "--wandb-api-key SECRETVALUE",
        "AWS_SECRET_ACCESS_KEY=SECRETVALUE",
        '{"hf_token": "SECRETVALUE"}',
        "hf_SECRETVALUESECRETVALUE",
        "https://account.blob.core.windows.net/c?sv=2024&sig=SECRETVALUE",
    ],
)
def test_secrets_are_removed(text: str) -> None:
    assert "SECRETVALUE" not in redact_text(text)
    assert HIDDEN in redact_text(text)


def test_the_rest_stays() -> None:
    for text in (
        "s3://bucket/imagenet/train", "lr=0.5", "tokenizer", "data_root: /data/x", "https://host/path?page=2",
    ):  # fmt: skip
        assert redact_text(text) == text


def test_records_keep_their_shape() -> None:
    record = {"api_key": "abc", "nested": [{"password": "x"}, "plain"], "none_token": None, "n": 3}
    assert redact(record) == record | {"api_key": HIDDEN, "nested": [{"password": HIDDEN}, "plain"]}
