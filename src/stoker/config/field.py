"""How a config key is declared: its type, its default, its unit; the docstring below it is the reference."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class KeyGroup(BaseModel):
    """Keys that concern the same thing; the groups add up to one flat namespace (stoker.config.schema)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        # NaN passes every comparison as False: a learning rate of NaN would train for days.
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`batch_size: true` is a slip, not the number 1."""
        assert info.field_name is not None
        items = value if isinstance(value, list) else [value]
        if cls.model_fields[info.field_name].annotation is not bool and any(isinstance(i, bool) for i in items):
            raise ValueError("true and false are no value for it")
        return value


def key(default: Any, *, unit: str | None = None, **constraints: Any) -> Any:
    """A config key with its default, its unit where it has one, and its bounds (ge, gt, le, lt ...)."""
    extra: Any = {"unit": unit} if unit else None
    return Field(default, json_schema_extra=extra, **constraints)
