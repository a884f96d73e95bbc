"""What is wrong with a value, in words for people instead of pydantic's for programmers."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from stoker.config.schema import describe_type
from stoker.errors import did_you_mean


def say_validation_error(error: ValidationError) -> dict[str, str]:
    """For each key with an invalid value one sentence that names the value and what would be valid."""
    by_key: dict[str, list[Any]] = {}
    for detail in error.errors():
        by_key.setdefault(str(detail["loc"][0]), []).append(detail)
    return {key: _say(key, details) for key, details in by_key.items()}


def _say(key: str, details: list[Any]) -> str:
    expected = describe_type(key).removesuffix(" | none")
    # A union reports once for each member; a bound that was missed says more than 'is not auto'.
    detail = next((d for d in details if d["type"] not in ("literal_error", "none_required")), details[0])
    given, context = detail["input"], detail.get("ctx", {})
    bound = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "above"),
        "less_than_equal": ("le", "at most"),
        "less_than": ("lt", "below"),
    }.get(detail["type"])
    if bound:
        return f"{key}: {_show(given)} must be {bound[1]} {context[bound[0]]}"
    if detail["type"] == "value_error":
        return f"{key}: {context['error']}"
    if detail["type"] == "finite_number":
        return f"{key}: {_show(given)} is not a finite number"
    if detail["type"] == "string_pattern_mismatch":
        allowed = "letters, digits and . _ = + - only, and begins with a letter or digit"
        return f"{key}: {_show(given)} may hold {allowed}"
    if detail["type"] in ("string_too_short", "string_too_long"):
        return f"{key}: {_show(given)} must have 1 to {context.get('max_length', 'many')} letters"
    if detail["type"] in ("missing", "too_long", "too_short") or (
        len(detail["loc"]) > 1 and detail["type"] == "tuple_type"
    ):
        return f"{key}: the list must be {expected}"
    meant = did_you_mean(given, expected.split(" | ")) if isinstance(given, str) else None
    return f"{key}: {_show(given)} is not {_article(expected)}" + (f"; {meant}" if meant else "")


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else text[:57] + "..."


def _article(expected: str) -> str:
    words = {
        "int": "a whole number",
        "float": "a number",
        "size": "a size like 62GB",
        "time": "a time like 18h",
    }
    if expected in words:
        return words[expected]
    if expected.startswith("["):
        return f"a list like {expected}"
    if " | " in expected:
        return "one of " + ", ".join(words.get(word, word) for word in expected.split(" | "))
    return expected
