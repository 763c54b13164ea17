"""Numbers just outside what `SamplingParams` allows, read from its own types."""

import dataclasses
import typing

from pydantic import TypeAdapter

from specserve.serve.requests.request import SamplingParams


def _outside(hint: object) -> list[float]:
    schema = TypeAdapter(hint).json_schema()
    for option in schema.get("anyOf", [schema]):
        if option.get("type") in ("integer", "number"):
            low = option["minimum"] - 1 if "minimum" in option else option["exclusiveMinimum"]
            return [low, option["maximum"] + 1]
    return []


# Of every field: the number below its range and the one above; empty where it is no number. A number without a range is
# a KeyError.
OUTSIDE: dict[str, list[float]] = {
    field.name: _outside(typing.get_type_hints(SamplingParams, include_extras=True)[field.name])
    for field in dataclasses.fields(SamplingParams)
}
