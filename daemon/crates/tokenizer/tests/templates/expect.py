"""Writes NAME.expected.json for every NAME.jinja here: what Python's Jinja makes of cases.json,
set up the way transformers sets it up; and probes.expected.json, what it makes of each template
of probes.json with two messages. Run after changing a template, a probe or a case: python3
expect.py (needs jinja2)."""

import datetime
import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """{% generation %}: prints its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


here = pathlib.Path(__file__).parent
environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
environment.filters["tojson"] = tojson
environment.globals["raise_exception"] = raise_exception
environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
cases = json.loads((here / "cases.json").read_text())
for path in sorted(here.glob("*.jinja")):
    template = environment.from_string(path.read_text())
    results = []
    for case in cases:
        try:
            text = template.render(**case, bos_token="<s>", eos_token="</s>", tools=None, documents=None)
            results.append({"text": text})
        except jinja2.exceptions.TemplateError as error:
            results.append({"raised": str(error)})
    path.with_suffix(".expected.json").write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n")

messages = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Yes."}]
results = []
for probe in json.loads((here / "probes.json").read_text()):
    try:
        text = environment.from_string(probe).render(
            messages=messages, bos_token="<s>", eos_token="</s>", tools=None, documents=None, add_generation_prompt=True
        )
        results.append({"text": text})
    except Exception as error:
        results.append({"raised": str(error)})
(here / "probes.expected.json").write_text(json.dumps(results, ensure_ascii=False, indent=1) + "\n")
