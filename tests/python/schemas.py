"""Holds outputs to the JSON schemas that pydantic, Go's generators and libraries of npm write, and checks each output
with another validator.

The schemas of npm's libraries come from tests/node/schemas.mjs. Each schema goes through the routes in turn, as a
format and as the parameters of a tool that is forced or strict. Prints a line of JSON: how many schemas were taken,
how many outputs were whole, and what was rejected.
"""

import argparse
import concurrent.futures
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import typing
import urllib.error
import urllib.request
import uuid

import jsonschema
import pydantic
import typing_extensions
from pydantic import BaseModel, ConfigDict, Field, RootModel, TypeAdapter


class Color(str, enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Address(BaseModel):
    street: str = Field(max_length=10)
    zip: typing.Annotated[str, Field(pattern=r"^\d{5}$")]


class Person(BaseModel):
    """A person."""

    name: str = Field(min_length=1, description="The name.", examples=["Ann"])
    age: int = Field(ge=0, lt=150)
    address: Address | None = None
    home: Address | None = Field(default=None, description="Where they live.")


class Node(BaseModel):
    value: int
    next: "Node | None" = None


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: str = "x"


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Cat(BaseModel):
    kind: typing.Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: typing.Literal["dog"]
    name: str


class Row(typing_extensions.TypedDict, total=False):
    a: typing_extensions.Required[int]
    b: str


class Pair(typing.NamedTuple):
    a: int
    b: str


class Settings(BaseModel):
    secret: pydantic.SecretStr
    level: Level = Level.LOW
    colors: list[Color] = Field(max_length=2)
    old: int = Field(default=0, deprecated=True)


PYDANTIC = {
    "str": str, "int": int, "float": float, "bool": bool, "none": None, "bytes": bytes, "any": typing.Any,
    "optional": int | None, "union": int | str | None, "literal": typing.Literal["a", 1, None], "enum": Color,
    "int_enum": Level, "decimal": decimal.Decimal, "datetime": datetime.datetime, "date": datetime.date,
    "time": datetime.time, "timedelta": datetime.timedelta, "uuid": uuid.UUID, "path": pathlib.Path,
    "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address, "network": ipaddress.IPv4Network,
    "pattern": typing.Pattern, "url": pydantic.AnyUrl, "http_url": pydantic.HttpUrl, "secret": pydantic.SecretStr,
    "base64": pydantic.Base64Str, "base64url": pydantic.Base64UrlStr, "json": pydantic.Json,
    "past": pydantic.PastDate, "aware": pydantic.AwareDatetime, "byte_size": pydantic.ByteSize,
    "positive": pydantic.PositiveInt, "non_negative": pydantic.NonNegativeFloat, "strict": pydantic.StrictInt,
    "constr": typing.Annotated[str, pydantic.StringConstraints(min_length=2, max_length=4, to_lower=True)],
    "multiple": typing.Annotated[int, Field(multiple_of=5, ge=0, le=100)], "list": list[int],
    "list_bounds": typing.Annotated[list[str], Field(min_length=1, max_length=2)], "tuple": tuple[int, str],
    "tuple_any": tuple[int, ...], "empty_tuple": tuple[()], "dict": dict[str, int], "dict_enum": dict[Color, int],
    "dict_literal": dict[typing.Literal["a", "b"], int], "dict_int": dict[int, str], "dict_uuid": dict[uuid.UUID, int],
    "dict_pattern": dict[typing.Annotated[str, Field(pattern="^k[0-9]$")], int],
    "dict_min": dict[typing.Annotated[str, Field(min_length=2)], int], "set_enum": set[Color], "set_int": set[int],
    "dict_bounds": typing.Annotated[dict[str, int], Field(min_length=1, max_length=2)], "person": Person,
    "people": list[Person], "node": Node, "closed": Closed, "open": Open, "settings": Settings, "row": Row, "pair": Pair,
    "discriminated": typing.Annotated[Cat | Dog, Field(discriminator="kind")], "either": Cat | Dog,
    "root": RootModel[list[Address]], "callable_list": list[Cat | Dog],
}

# What github.com/invopop/jsonschema and github.com/google/jsonschema-go write for structs, maps,
# slices, pointers and
# tags.
INVOPOP = "https://json-schema.org/draft/2020-12/schema"
GO = {
    "invopop struct": {"$schema": INVOPOP, "$id": "https://example.com/demo/user", "$ref": "#/$defs/User", "$defs": {
        "User": {"properties": {"id": {"type": "integer"}, "name": {"type": "string", "title": "the name", "examples": ["joe"], "maxLength": 9},
                                "tags": {"additionalProperties": {"type": "string"}, "type": "object"},
                                "born": {"type": "string", "format": "date-time"}, "feelings": {"oneOf": [{"type": "string"}, {"type": "integer"}]}},
                 "additionalProperties": False, "type": "object", "required": ["id", "name"]}}},
    "invopop nested": {"$schema": INVOPOP, "$ref": "#/$defs/Order", "$defs": {
        "Item": {"properties": {"sku": {"type": "string", "pattern": "^[A-Z]{3}$"}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
                 "additionalProperties": False, "type": "object", "required": ["sku", "n"]},
        "Order": {"properties": {"items": {"items": {"$ref": "#/$defs/Item"}, "type": "array", "minItems": 1, "maxItems": 2},
                                 "first": {"$ref": "#/$defs/Item"}, "data": {"type": "string", "contentEncoding": "base64", "maxLength": 8}},
                  "additionalProperties": False, "type": "object", "required": ["items"]}}},
    "invopop map": {"$schema": INVOPOP, "patternProperties": {"^[0-9]+$": {"type": "boolean"}}, "type": "object", "additionalProperties": False},
    "invopop anonymous": {"$schema": INVOPOP, "properties": {"a": True, "raw": True, "ip": {"type": "string", "format": "ipv4"}, "u": {"type": "string", "format": "uri"}},
                          "additionalProperties": False, "type": "object", "required": ["a"]},
    "invopop tree": {"$schema": INVOPOP, "$ref": "#/$defs/T", "$defs": {"T": {"properties": {"v": {"type": "integer"}, "l": {"$ref": "#/$defs/T"}},
                     "additionalProperties": False, "type": "object", "required": ["v"]}}},
    # As OpenAI's library for Go asks for it: without references and other members.
    "openai-go recipe": {"$schema": INVOPOP, "$id": "https://example.com/main/historical-computer", "properties": {
        "origin": {"properties": {"year_of_construction": {"type": "integer", "description": "when"}, "organization": {"type": "string"}},
                   "additionalProperties": False, "type": "object", "required": ["year_of_construction", "organization"]},
        "full_name": {"type": "string", "title": "Full Name"}, "long_bio": {"oneOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"type": "string", "enum": ["analog", "digital"], "default": "digital"},
        "notable_facts": {"items": {"type": "string"}, "type": "array", "maxItems": 2}},
        "additionalProperties": False, "type": "object", "required": ["origin", "full_name", "long_bio", "kind", "notable_facts"]},
    "invopop numbers": {"$schema": INVOPOP, "properties": {"i8": {"type": "integer", "minimum": -128, "maximum": 127}, "u64": {"type": "integer", "minimum": 0},
                        "f": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "step": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}},
                        "additionalProperties": False, "type": "object", "required": ["i8", "u64", "f", "step"]},
    "invopop dependent": {"$schema": INVOPOP, "properties": {"a": {"type": "string", "maxLength": 4}, "b": {"type": "string", "maxLength": 4}},
                          "additionalProperties": False, "type": "object", "oneOf": [{"required": ["a"], "title": "a"}, {"required": ["b"], "title": "b"}]},
    "google struct": {"type": "object", "properties": {"name": {"type": "string", "description": "the name"}, "n": {"type": "integer"}, "p": {"type": ["null", "integer"]},
                      "list": {"type": ["null", "array"], "items": {"type": "string"}}, "f": {"type": "number"}}, "required": ["name", "n"], "additionalProperties": False},
    "google not": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"not": {}}},
    "google map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "google any": {},
    "google bytes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "minItems": 2, "maxItems": 2},
    "google enum": {"type": "string", "enum": ["a", "b"], "default": "a"},
    "google nested": {"type": "object", "properties": {"in": {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"], "additionalProperties": False},
                      "m": {"type": "object", "additionalProperties": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}}},
                      "required": ["in"], "propertyOrdering": ["in", "m"]},
    "omitempty missing": {"type": "object", "properties": None, "required": None, "additionalProperties": False},
}


def generated(lines):
    found = [json.loads(line) for line in lines]
    for name, kind in PYDANTIC.items():
        found.append({"library": "pydantic", "name": name, "schema": TypeAdapter(kind).json_schema()})
    found += [{"library": "Go", "name": name, "schema": schema} for name, schema in GO.items()]
    return found


def routes(model, schema):
    """Requests that hold an output to a schema, each with where the output stands."""
    said = [{"role": "user", "content": "Tell me a story."}]
    most = 500
    chat = {"model": model, "messages": said, "max_tokens": most, "temperature": 1, "seed": 7}
    ollama = {"model": model, "messages": said, "stream": False, "options": {"num_predict": most, "temperature": 1, "seed": 7}}
    whole = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    formats = [
        ("/v1/chat/completions", {**chat, "response_format": whole}, lambda d: (d["choices"][0]["message"]["content"], d["choices"][0]["finish_reason"])),
        ("/v1/responses", {"model": model, "input": "Tell me a story.", "max_output_tokens": most, "temperature": 1,
                           "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
         lambda d: ("".join(p["text"] for o in d["output"] if o["type"] == "message" for p in o["content"]), d["status"])),
        ("/v1/messages", {**chat, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
         lambda d: ("".join(p["text"] for p in d["content"]), d["stop_reason"])),
        ("/api/chat", {**ollama, "format": schema}, lambda d: (d["message"]["content"], d["done_reason"])),
    ]
    if schema.get("type") != "object":
        return formats
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    return formats + [
        ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
         lambda d: (d["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"], d["choices"][0]["finish_reason"])),
        ("/v1/messages", {**chat, "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "tool", "name": "f"}},
         lambda d: (json.dumps(d["content"][0].get("input", {})), d["stop_reason"])),
        ("/v1/chat/completions", {**chat, "tools": [tool], "max_tokens": 2}, lambda d: ("", "length")),
    ]


def validator(schema):
    """The validator of the draft that a schema names, with or without an empty fragment."""
    drafts = [jsonschema.Draft4Validator, jsonschema.Draft7Validator, jsonschema.Draft201909Validator]
    named = str(schema.get("$schema")).rstrip("#")
    of = {draft.META_SCHEMA["$schema"].rstrip("#"): draft for draft in drafts}
    # TypeBox names none, and writes tuples as draft 7 does.
    text = json.dumps(schema)
    lists = '"items": [' in text
    # zod-to-json-schema writes draft 4's words below the name of a later one, where True is 1.
    if '"exclusiveMinimum": true' in text or '"exclusiveMaximum": true' in text:
        return jsonschema.Draft4Validator
    return of.get(named, jsonschema.Draft7Validator if lists else jsonschema.Draft202012Validator)


CUT = ("length", "incomplete", "max_tokens")


def main():
    parser = argparse.ArgumentParser()
    for name in ("url", "token", "model", "schemas"):
        parser.add_argument("--" + name)
    asked = parser.parse_args()
    lines = pathlib.Path(asked.schemas).read_text().splitlines() if asked.schemas else []

    def ask(at, one):
        ways = routes(asked.model, one["schema"])
        path, body, output = ways[at % len(ways)]
        headers = {"content-type": "application/json", "authorization": f"Bearer {asked.token}"}
        request = urllib.request.Request(asked.url + path, json.dumps(body).encode(), headers)
        name = f"{one['library']}: {one['name']}"
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                said, ended = output(json.load(reply))
        except urllib.error.HTTPError as error:
            return name, "rejected", error.read().decode()[:300]
        if ended in CUT:
            return name, "cut", None
        try:
            value = json.loads(said)
        except ValueError:
            return name, "wrong", f"{path}: no JSON: {said!r}"
        # OpenAPI's words are none of draft 2020-12.
        if "openapi" in one["library"].lower():
            return name, "whole", None
        schema = {k: v for k, v in one["schema"].items() if v is not None}
        errors = list(validator(schema)(schema).iter_errors(value))
        return (name, "wrong", f"{path}: {errors[0].message}: {said}") if errors else (name, "whole", None)

    found = generated(lines)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, range(len(found)), found))
    of = lambda kind: {name: why for name, outcome, why in results if outcome == kind}
    count = lambda kind: sum(outcome == kind for _, outcome, _ in results)
    print(json.dumps({"schemas": len(found), "whole": count("whole"), "cut": count("cut"), "rejected": of("rejected"), "wrong": of("wrong")}))


main()
