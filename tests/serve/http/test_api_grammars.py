"""Structured output over HTTP: every spelling becomes the grammar it means; a bad one is a 400 that names it."""

import json
from typing import Any

import pydantic
import pytest
from fakes import USER, assert_refused, assert_serves

from specserve.serve.requests.request import GrammarSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_SCHEMA = GrammarSpec("json_schema", json.dumps(SCHEMA))
ANY_OBJECT = GrammarSpec("json_schema", '{"type": "object"}')
SPELLINGS: list[tuple[dict[str, Any], GrammarSpec]] = [
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, AS_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, AS_SCHEMA),
    ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("choice", '["a", "b"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarSpec("lark", 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"guided_json": SCHEMA}, AS_SCHEMA),
    ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, GrammarSpec("choice", '["a", "b"]')),
    ({"guided_grammar": 'start: "a"'}, GrammarSpec("lark", 'start: "a"')),
]


@pytest.mark.parametrize(("fields", "spec"), SPELLINGS)
def test_every_spelling_is_the_grammar_it_means(http, fake_engine, fields, spec):
    for route, prompt in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": USER})):
        reply = http.post(f"/v1/{route}", json={**prompt, **fields, "n": 2})
        assert reply.status_code == 200, reply.text
        assert [request.params.grammar for request in fake_engine.requests[-2:]] == [spec, spec]


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": {}}]
)
def test_what_asks_for_nothing_constrains_nothing(http, fake_engine, fields):
    assert http.post("/v1/completions", json={"prompt": "x", **fields}).status_code == 200
    assert fake_engine.requests[-1].params.grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "forbidden"}, "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"forbidden": 1}}}}, None),
        ({"structured_outputs": {"regex": "forbidden"}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": 7}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, None),
        ({"structured_outputs": {"bogus": 1}}, "structured_outputs.bogus"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_a_bad_one_is_a_400_that_names_it(http, fields, param):
    error = assert_refused(http.post("/v1/chat/completions", json={"messages": USER, **fields}))
    assert str(error["param"]).startswith(param or "response_format")
    assert_serves(http)


def test_the_openai_client_parses_into_a_model(client, fake_engine):
    class Point(pydantic.BaseModel):
        x: int

    with pytest.raises(pydantic.ValidationError):  # the fake engine writes no JSON; what was asked is looked at
        client.chat.completions.parse(model=fake_engine.model_name, messages=USER, response_format=Point)
    schema = json.loads(fake_engine.requests[-1].params.grammar.text)
    assert schema["required"] == ["x"]
    assert schema["additionalProperties"] is False
