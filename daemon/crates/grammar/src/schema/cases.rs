//! Schemas with texts that are valid under them and texts that are not.

use serde_json::{Value, json};

/// A keyword, a schema with it, texts that are valid, and texts that are not.
pub(super) type Case = (
    &'static str,
    Value,
    &'static [&'static str],
    &'static [&'static str],
);

pub(super) fn of_core() -> Vec<Case> {
    let b = json!({"type": "integer"});
    vec![
        (
            "$ref",
            json!({"$ref": "#/definitions/a~1b/c%25", "definitions": {"a/b": {"c%": b}}}),
            &["1"],
            &["true"],
        ),
        (
            "$ref",
            json!({"$ref": "#/$defs/x~0y", "minimum": 3, "$defs": {"x~y": b}}),
            &["3"],
            &["2", "null"],
        ),
        (
            "$ref",
            json!({"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": false}),
            &["{}", "{\"n\":{\"n\":{}}}"],
            &["{\"n\":1}"],
        ),
        (
            "$ref",
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "minimum": 5, "definitions": {"a": b}}),
            &["1"],
            &["true"],
        ),
        (
            "$ref",
            json!({"$ref": "#/x-types/0", "x-types": [b]}),
            &["1"],
            &["true"],
        ),
        (
            "$id",
            json!({"$id": "http://h/s/root.json", "$ref": "item.json", "$defs": {"i": {"$id": "item.json", "type": "integer"}}}),
            &["1"],
            &["true"],
        ),
        (
            "$id",
            json!({"$id": "http://h/root.json", "$ref": "#/$defs/i", "$defs": {"i": {"$id": "item.json", "$ref": "#/$defs/own", "$defs": {"own": b}}}}),
            &["1"],
            &["true"],
        ),
        (
            "id",
            json!({"$ref": "#node", "definitions": {"i": {"id": "#node", "type": "integer"}}}),
            &["1"],
            &["true"],
        ),
        (
            "$anchor",
            json!({"$ref": "#node", "$defs": {"i": {"$anchor": "node", "type": "integer"}}}),
            &["1"],
            &["true"],
        ),
        (
            "$dynamicAnchor",
            json!({"$dynamicAnchor": "n", "type": "object", "properties": {"n": {"$dynamicRef": "#n"}}, "additionalProperties": false}),
            &["{\"n\":{}}"],
            &["{\"n\":1}"],
        ),
        (
            "$recursiveRef",
            json!({"$recursiveAnchor": true, "type": "array", "items": {"$recursiveRef": "#"}}),
            &["[[],[[]]]"],
            &["[1]"],
        ),
        (
            "$defs",
            json!({"$ref": "#/$defs/a", "$defs": {"a": true}}),
            &["1", "{}"],
            &[],
        ),
        (
            "definitions",
            json!({"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/b"}, "b": b}}),
            &["1"],
            &["true"],
        ),
        (
            "x-guidance",
            json!({"type": "array", "items": b, "x-guidance": {"whitespace_flexible": false}}),
            &["[1,2]"],
            &["[1, 2]"],
        ),
    ]
}

pub(super) fn of_applicators() -> Vec<Case> {
    let closed = |properties: Value| json!({"type": "object", "properties": properties, "additionalProperties": false});
    let n = json!({"type": "integer"});
    vec![
        (
            "allOf",
            json!({"allOf": [n, {"minimum": 3}]}),
            &["3"],
            &["2"],
        ),
        (
            "anyOf",
            json!({"anyOf": [n, {"type": "null"}]}),
            &["3", "null"],
            &["true"],
        ),
        (
            "oneOf",
            json!({"oneOf": [n, {"type": "null"}]}),
            &["3", "null"],
            &["true"],
        ),
        (
            "oneOf",
            {
                let mut schema = closed(json!({"a": n, "b": n}));
                schema["oneOf"] = json!([{"required": ["a"]}, {"required": ["b"]}]);
                schema
            },
            &["{\"a\":1}", "{\"b\":1}"],
            &["{}", "{\"a\":1,\"b\":1}"],
        ),
        (
            "not",
            json!({"not": {"type": ["string", "object"]}}),
            &["1", "null"],
            &["\"a\"", "{}"],
        ),
        (
            "not",
            json!({"type": "string", "not": {"enum": ["ab", "b"]}}),
            &["\"a\"", "\"abc\"", "\"\""],
            &["\"ab\"", "\"b\"", "1"],
        ),
        (
            "not",
            json!({"type": "integer", "not": {"const": 3}}),
            &["2", "4", "33"],
            &["3"],
        ),
        (
            "not",
            json!({"type": "integer", "not": {"not": {"minimum": 3}}}),
            &["3"],
            &["2"],
        ),
        (
            "not",
            json!({"type": "array", "items": n, "not": {"maxItems": 1}}),
            &["[1,2]"],
            &["[1]"],
        ),
        (
            "not",
            json!({"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": n}),
            &["{\"b\":1}"],
            &["{\"a\":1}"],
        ),
        (
            "if",
            json!({"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "x": n, "y": n}, "required": ["k"], "additionalProperties": false,
            "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]}, "else": {"required": ["y"]}}),
            &[
                "{\"k\":\"a\",\"x\":1}",
                "{\"k\":\"b\",\"y\":1}",
                "{\"k\":\"b\",\"x\":1,\"y\":2}",
            ],
            &["{\"k\":\"a\",\"y\":1}", "{\"k\":\"b\",\"x\":1}"],
        ),
        (
            "then",
            json!({"type": "integer", "if": {"minimum": 10}, "then": {"maximum": 12}}),
            &["3", "11"],
            &["13"],
        ),
        (
            "else",
            json!({"type": "integer", "if": {"minimum": 10}, "else": {"maximum": 2}}),
            &["1", "11"],
            &["5"],
        ),
        (
            "dependentSchemas",
            {
                let mut schema = closed(json!({"a": n, "b": n}));
                schema["dependentSchemas"] = json!({"a": {"required": ["b"]}});
                schema
            },
            &["{}", "{\"b\":1}", "{\"a\":1,\"b\":1}"],
            &["{\"a\":1}"],
        ),
        (
            "dependencies",
            {
                let mut schema = closed(json!({"a": n, "b": n, "c": n}));
                schema["dependencies"] = json!({"a": ["b"], "c": {"required": ["b"]}});
                schema
            },
            &["{}", "{\"a\":1,\"b\":1}"],
            &["{\"a\":1}", "{\"c\":1}"],
        ),
        (
            "dependentRequired",
            {
                let mut schema = closed(json!({"a": n, "b": n}));
                schema["dependentRequired"] = json!({"a": ["b"]});
                schema
            },
            &["{}", "{\"a\":1,\"b\":1}"],
            &["{\"a\":1}"],
        ),
        (
            "prefixItems",
            json!({"type": "array", "prefixItems": [n, {"type": "null"}], "items": false, "minItems": 2}),
            &["[1,null]"],
            &["[null,1]", "[1,null,1]", "[1]"],
        ),
        (
            "items",
            json!({"type": "array", "items": [n, {"type": "null"}], "additionalItems": false}),
            &["[1,null]"],
            &["[1,1]", "[1,null,1]"],
        ),
        (
            "additionalItems",
            json!({"type": "array", "items": [n], "additionalItems": {"type": "null"}}),
            &["[1,null]"],
            &["[1,1]"],
        ),
        (
            "additionalItems",
            json!({"type": "array", "items": n, "additionalItems": false}),
            &["[1,2]"],
            &["[null]"],
        ),
        (
            "contains",
            json!({"type": "array", "items": {"type": ["integer", "null"]}, "maxItems": 3, "contains": n}),
            &["[null,1]", "[1]", "[null,null,3]"],
            &["[]", "[null]"],
        ),
        (
            "contains",
            json!({"type": "array", "items": n, "contains": n, "minContains": 2, "maxContains": 3}),
            &["[1,2]"],
            &["[1]", "[1,2,3,4]"],
        ),
        (
            "minContains",
            json!({"type": "array", "items": n, "contains": {"type": "null"}, "minContains": 0}),
            &["[]", "[1]"],
            &["[null]"],
        ),
        (
            "maxContains",
            json!({"type": "array", "items": n, "contains": true, "maxContains": 1}),
            &["[1]"],
            &["[]", "[1,2]"],
        ),
        (
            "properties",
            json!({"type": "object", "properties": {"a": n}}),
            &["{\"a\":1}", "{\"b\":null}"],
            &["{\"a\":null}"],
        ),
        (
            "properties",
            json!({"type": "object", "properties": null, "required": null}),
            &["{}"],
            &["1"],
        ),
        (
            "patternProperties",
            json!({"type": "object", "patternProperties": {"^a": n}, "additionalProperties": false}),
            &["{\"ab\":1}"],
            &["{\"b\":1}", "{\"a\":null}"],
        ),
        (
            "additionalProperties",
            json!({"type": "object", "additionalProperties": n}),
            &["{\"ab\":1}"],
            &["{\"b\":null}"],
        ),
        (
            "propertyNames",
            json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": n}),
            &["{\"x\":1}"],
            &["{\"x\":null}"],
        ),
        (
            "propertyNames",
            json!({"type": "object", "propertyNames": {"$ref": "#/$defs/k"}, "additionalProperties": n, "required": ["a"], "$defs": {"k": {"type": "string", "enum": ["a", "b"]}}}),
            &["{\"a\":1}", "{\"a\":1,\"b\":2}"],
            &["{\"c\":1}", "{\"b\":1}"],
        ),
        (
            "propertyNames",
            json!({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": n}),
            &["{\"ab\":1}"],
            &["{\"x\":1}"],
        ),
        (
            "propertyNames",
            json!({"type": "object", "properties": {"x": n, "abc": n}, "propertyNames": {"minLength": 2, "maxLength": 3}}),
            &["{\"abc\":1}", "{\"de\":null}"],
            &["{\"x\":1}", "{\"d\":1}", "{\"defg\":1}"],
        ),
        (
            "propertyNames",
            json!({"type": "object", "properties": {"x": n, "abc": n}, "required": ["abc"], "propertyNames": {"minLength": 2}, "additionalProperties": false}),
            &["{\"abc\":1}"],
            &["{\"x\":1,\"abc\":1}", "{\"abc\":1,\"de\":1}"],
        ),
        (
            "propertyNames",
            json!({"type": "object", "properties": {"b": n}, "required": ["b"], "propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": false}),
            &["{\"b\":1}"],
            &["{\"a\":1,\"b\":1}", "{\"b\":null}"],
        ),
        (
            "propertyNames",
            json!({"type": "object", "properties": {"b": {"type": "null"}, "long": n}, "required": ["b"], "propertyNames": {"minLength": 1, "maxLength": 2}, "additionalProperties": n}),
            &["{\"b\":null}", "{\"b\":null,\"cd\":1}"],
            &[
                "{\"b\":1}",
                "{\"b\":null,\"cd\":null}",
                "{\"b\":null,\"cde\":1}",
                "{\"b\":null,\"\":1}",
                "{\"b\":null,\"long\":1}",
            ],
        ),
        (
            "patternProperties",
            json!({"type": "object", "properties": {"b": n}, "patternProperties": {"^a": false}, "additionalProperties": n}),
            &["{\"b\":1}", "{\"b\":1,\"ba\":1}", "{\"c\":1}"],
            &["{\"a\":1}", "{\"ab\":1}", "{\"b\":1,\"ab\":1}"],
        ),
        (
            "unevaluatedItems",
            json!({"type": "array", "prefixItems": [n], "unevaluatedItems": false}),
            &["[1]", "[]"],
            &["[1,1]"],
        ),
        (
            "unevaluatedProperties",
            json!({"type": "object", "properties": {"a": n}, "unevaluatedProperties": false}),
            &["{\"a\":1}"],
            &["{\"b\":1}"],
        ),
        (
            "unevaluatedProperties",
            json!({"allOf": [{"$ref": "#/$defs/b"}], "properties": {"a": n}, "type": "object", "unevaluatedProperties": false, "$defs": {"b": {"properties": {"b": n}}}}),
            &["{\"a\":1}", "{\"b\":2,\"a\":1}"],
            &["{\"c\":1}", "{\"b\":null}"],
        ),
        (
            "unevaluatedProperties",
            json!({"type": "object", "properties": {"a": n}, "anyOf": [{"properties": {"b": n}, "required": ["b"]}, {"properties": {"c": n}}], "unevaluatedProperties": false}),
            &["{\"a\":1,\"b\":2}", "{\"c\":1}"],
            &["{\"d\":1}", "{\"b\":null}"],
        ),
    ]
}

pub(super) fn of_validation() -> Vec<Case> {
    let n = json!({"type": "integer"});
    let many = |least: u64, most: Option<u64>, open: bool| {
        let mut schema = json!({"type": "object", "properties": {"a": n, "b": n, "c": n}, "required": ["a"], "additionalProperties": open, "minProperties": least});
        if let Some(most) = most {
            schema["maxProperties"] = most.into();
        }
        schema
    };
    vec![
        (
            "type",
            json!({"type": ["integer", "number", "null"]}),
            &["1.5", "null"],
            &["true"],
        ),
        (
            "nullable",
            json!({"type": "integer", "nullable": true}),
            &["1", "null"],
            &["true"],
        ),
        (
            "nullable",
            json!({"type": "string", "enum": ["a"], "nullable": true}),
            &["\"a\"", "null"],
            &["\"b\""],
        ),
        (
            "enum",
            json!({"enum": [1, "a", null, [1, "b"], {"k": true}]}),
            &["1", "\"a\"", "null", "[1,\"b\"]", "{\"k\":true}"],
            &["2", "[1]", "{}"],
        ),
        ("const", json!({"const": null}), &["null"], &["1"]),
        (
            "const",
            json!({"type": "object", "properties": {"v": {"const": 1.5}}, "required": ["v"]}),
            &["{\"v\":1.5}"],
            &["{\"v\":1}"],
        ),
        (
            "maximum",
            json!({"type": "number", "minimum": -3.4e38, "maximum": 1e19}),
            &["-1.5", "9007199254740992"],
            &["9007199254740993", "true"],
        ),
        (
            "multipleOf",
            json!({"type": "integer", "multipleOf": 5}),
            &["10"],
            &["12"],
        ),
        (
            "maximum",
            json!({"type": "integer", "maximum": 5}),
            &["5"],
            &["6"],
        ),
        (
            "minimum",
            json!({"type": "integer", "minimum": 5}),
            &["5"],
            &["4"],
        ),
        (
            "exclusiveMaximum",
            json!({"type": "integer", "exclusiveMaximum": 5}),
            &["4"],
            &["5"],
        ),
        (
            "exclusiveMinimum",
            json!({"type": "integer", "minimum": 5, "exclusiveMinimum": true}),
            &["6"],
            &["5"],
        ),
        (
            "maxLength",
            json!({"type": "string", "maxLength": 2.0}),
            &["\"ab\""],
            &["\"abc\""],
        ),
        (
            "minLength",
            json!({"type": "string", "minLength": 2}),
            &["\"ab\""],
            &["\"a\""],
        ),
        (
            "pattern",
            json!({"type": "string", "pattern": "^(?!x)[a-z]+$"}),
            &["\"ab\""],
            &["\"xb\"", "\"1\""],
        ),
        (
            "maxItems",
            json!({"type": "array", "items": n, "maxItems": 1}),
            &["[1]"],
            &["[1,2]"],
        ),
        (
            "minItems",
            json!({"type": "array", "items": n, "minItems": 2}),
            &["[1,2]"],
            &["[1]"],
        ),
        (
            "uniqueItems",
            json!({"type": "array", "items": {"$ref": "#/$defs/c"}, "uniqueItems": true, "$defs": {"c": {"anyOf": [{"const": 1}, {"const": 2}]}}}),
            &["[2,1]", "[]"],
            &["[1,1]"],
        ),
        (
            "pattern",
            json!({"type": "string", "format": "duration", "pattern": "^P(?:(?!.*W)(?=[0-9]|T).*)$"}),
            &["\"P1D\""],
            &["\"P\""],
        ),
        (
            "uniqueItems",
            json!({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": true, "minItems": 1}),
            &["[\"b\",\"a\"]", "[\"b\"]"],
            &["[\"a\",\"a\"]", "[]"],
        ),
        (
            "uniqueItems",
            json!({"type": "array", "items": n, "uniqueItems": true, "maxItems": 1}),
            &["[1]"],
            &["[1,2]"],
        ),
        (
            "maxProperties",
            many(0, Some(2), true),
            &["{\"a\":1}", "{\"a\":1,\"c\":2}", "{\"a\":1,\"z\":2}"],
            &[
                "{}",
                "{\"a\":1,\"b\":2,\"c\":3}",
                "{\"a\":1,\"c\":2,\"z\":3}",
            ],
        ),
        (
            "maxProperties",
            many(0, Some(3), false),
            &["{\"a\":1,\"b\":2,\"c\":3}"],
            &["{}"],
        ),
        (
            "minProperties",
            many(2, None, false),
            &["{\"a\":1,\"c\":2}", "{\"a\":1,\"b\":2,\"c\":3}"],
            &["{\"a\":1}", "{\"b\":1,\"c\":2}"],
        ),
        (
            "minProperties",
            many(3, None, true),
            &["{\"a\":1,\"b\":2,\"z\":3}", "{\"a\":1,\"y\":2,\"z\":3}"],
            &["{\"a\":1,\"z\":2}"],
        ),
        (
            "minProperties",
            many(1, None, true),
            &["{\"a\":1}"],
            &["{}"],
        ),
        (
            "required",
            json!({"type": "object", "properties": {"a": {"type": "integer", "required": true}}, "required": ["a", "a"]}),
            &["{\"a\":1}"],
            &["{}"],
        ),
        (
            "format",
            json!({"type": "string", "format": "date"}),
            &["\"2026-11-27\""],
            &["\"27.11.\""],
        ),
        (
            "format",
            json!({"type": "string", "format": "nanoid"}),
            &["\"x\""],
            &["1"],
        ),
        (
            "format",
            json!({"type": "string", "format": "date", "pattern": "^x$"}),
            &["\"x\""],
            &["\"2026-11-27\""],
        ),
    ]
}
