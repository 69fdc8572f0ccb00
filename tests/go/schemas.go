// Prints the JSON schemas that generators of Go write for types of all kinds, a line each:
// {"library", "name", "schema"}. The generators are github.com/alecthomas/jsonschema, from which
// github.com/invopop/jsonschema descends, and github.com/getkin/kin-openapi for OpenAPI 3.0; Debian
// has them.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"os"
	"reflect"
	"time"

	"github.com/alecthomas/jsonschema"
	"github.com/getkin/kin-openapi/openapi3gen"
)

type plain struct {
	Text   string  `json:"text"`
	Whole  int     `json:"whole"`
	Small  uint8   `json:"small"`
	Large  uint64  `json:"large"`
	Number float64 `json:"number"`
	Truth  bool    `json:"truth"`
}

type optional struct {
	Text   *string  `json:"text,omitempty"`
	Number *float64 `json:"number,omitempty"`
	Inner  *plain   `json:"inner,omitempty"`
}

type described struct {
	Name string `json:"name" jsonschema:"title=the name,description=of a user,example=joe,default=alex,minLength=1,maxLength=9"`
	Age  int    `json:"age" jsonschema:"minimum=18,maximum=120"`
	Open int    `json:"open" jsonschema:"minimum=1,maximum=9,exclusiveMinimum=true,exclusiveMaximum=true"`
	Step int    `json:"step" jsonschema:"multipleOf=5,minimum=0,maximum=50"`
	Code string `json:"code" jsonschema:"pattern=^[A-Z]{3}$"`
	More string `json:"more" jsonschema_description:"in a tag of its own" jsonschema_extras:"a=b"`
}

type formats struct {
	At   time.Time `json:"at"`
	Link url.URL   `json:"link"`
	IP   net.IP    `json:"ip"`
	Mail string    `json:"mail" jsonschema:"format=email,maxLength=30"`
	Host string    `json:"host" jsonschema:"format=hostname,maxLength=20"`
	Six  string    `json:"six" jsonschema:"format=ipv6"`
}

type choices struct {
	Color string  `json:"color" jsonschema:"enum=red,enum=green,enum=blue"`
	Rank  int     `json:"rank,omitempty" jsonschema:"enum=1,enum=2,enum=3"`
	Scale float64 `json:"scale,omitempty" jsonschema:"enum=1.0,enum=1.5"`
	Any   any     `json:"any" jsonschema:"oneof_type=string;array"`
	None  string  `json:"none" jsonschema:"nullable"`
}

type either struct {
	First  string `json:"first,omitempty" jsonschema:"oneof_required=one"`
	Second string `json:"second,omitempty" jsonschema:"oneof_required=two"`
	Third  string `json:"third,omitempty" jsonschema:"oneof_required=one"`
}

type lists struct {
	Texts []string        `json:"texts" jsonschema:"minItems=1,maxItems=2"`
	Pair  [2]int          `json:"pair"`
	Grid  [][]bool        `json:"grid" jsonschema:"maxItems=2"`
	Inner []described     `json:"inner,omitempty" jsonschema:"maxItems=1"`
	Bytes []byte          `json:"bytes" jsonschema:"maxLength=8"`
	Raw   json.RawMessage `json:"raw"`
}

type maps struct {
	Texts  map[string]string  `json:"texts"`
	Inner  map[string]choices `json:"inner"`
	Any    map[string]any     `json:"any"`
	Whole  map[int]string     `json:"whole"`
	Values any                `json:"values"`
}

type base struct {
	ID string `json:"id" jsonschema:"required,maxLength=8"`
}

type embedded struct {
	base
	*optional
	Own     string `json:"own"`
	Ignored string `json:"-"`
	Untold  string `jsonschema:"-"`
	hidden  int
}

type tree struct {
	Value int    `json:"value"`
	Left  *tree  `json:"left,omitempty"`
	Right *tree  `json:"right,omitempty"`
	More  []tree `json:"more,omitempty"`
}

type anonymous struct {
	Inner struct {
		A int `json:"a"`
		B struct {
			C string `json:"c"`
		} `json:"b"`
	} `json:"inner"`
}

type empty struct{}

func main() {
	types := []any{
		plain{}, optional{}, described{}, formats{}, choices{}, either{}, lists{}, maps{}, embedded{},
		anonymous{}, empty{}, map[string]int{}, map[string]plain{}, []string{}, []plain{}, "", 1, 1.5, true,
		time.Time{},
	}
	reflectors := []struct {
		kind string
		jsonschema.Reflector
	}{
		{kind: "as it is"},
		// What OpenAI's library for Go recommends.
		{"without references", jsonschema.Reflector{DoNotReference: true}},
		{"open", jsonschema.Reflector{AllowAdditionalProperties: true}},
		{"required by tags", jsonschema.Reflector{RequiredFromJSONSchemaTags: true}},
		{"full names", jsonschema.Reflector{FullyQualifyTypeNames: true}},
	}
	out := json.NewEncoder(os.Stdout)
	check := func(name string, err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, name, err)
			os.Exit(1)
		}
	}
	print := func(kind string, reflector *jsonschema.Reflector, value any) {
		name := fmt.Sprintf("%s, %s", reflect.TypeOf(value), kind)
		check(name, out.Encode(map[string]any{"library": "go", "name": name, "schema": reflector.Reflect(value)}))
	}
	for _, one := range reflectors {
		for _, value := range types {
			print(one.kind, &one.Reflector, value)
		}
		if !one.DoNotReference {
			print(one.kind, &one.Reflector, tree{})
		}
	}
	for _, value := range []any{plain{}, described{}, choices{}, either{}, lists{}} {
		print("expanded", &jsonschema.Reflector{ExpandedStruct: true}, value)
	}
	for _, value := range types {
		name := fmt.Sprint(reflect.TypeOf(value))
		schema, err := openapi3gen.NewSchemaRefForValue(value, nil)
		check(name, err)
		check(name, out.Encode(map[string]any{"library": "go openapi-3.0", "name": name, "schema": schema}))
	}
}
