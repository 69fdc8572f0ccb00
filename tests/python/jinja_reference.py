"""What Python's Jinja2 makes of the expressions, templates and chats below
daemon/crates/jinja/tests/reference, set up as transformers sets it up (5.x,
utils/chat_template_utils.py): writes expressions.json and renderings.json, which the crate's tests
compare with what it renders. With --check nothing is written: it fails where a file is not what
would be written, and where a filter, a test, a global or a method of Python's types is in no
expression.

With --templates DIRECTORY it prints what Jinja2 makes of each template of that directory with each of
the chats: `cargo test -p rocmforge-jinja of_others` compares, with ROCMFORGE_TEMPLATES the directory
and ROCMFORGE_RENDERINGS the file of what was printed. So templates that the repository may not hold
are tried.

With --random SEED COUNT it prints random templates of jinja_random.py, a line of JSON each, and what
Jinja2 makes of them. `cargo test -p rocmforge-jinja random` compares, with ROCMFORGE_RANDOM_TEMPLATES
the file of what was printed; .ci/run does both."""

import datetime
import json
import pathlib
import re
import sys
import warnings

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.sandbox

import jinja_random

HERE = pathlib.Path(__file__).resolve().parents[2] / "daemon/crates/jinja/tests/reference"
#: In seconds; strftime_now would write another text every day.
NOW = datetime.datetime(2026, 2, 3, 4, 5, 6)


class Generation(jinja2.ext.Extension):
    """{% generation %}: prints its body, which has a scope of its own."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment(kind=jinja2.sandbox.ImmutableSandboxedEnvironment):
    made = kind(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: NOW.strftime(form)
    return made


def rendered(made, source, variables):
    """The text, or that it fails: raised in the template's own words. Other words are left out: they
    change with Python."""
    try:
        return {"text": made.from_string(source).render(**variables)}
    except jinja2.exceptions.TemplateSyntaxError:
        return {"syntax": True}
    except (jinja2.exceptions.UndefinedError, jinja2.exceptions.SecurityError, jinja2.exceptions.TemplateRuntimeError):
        return {"failed": True}
    except jinja2.exceptions.TemplateError as error:
        return {"raised": str(error)}
    except Exception:
        return {"failed": True}


def templates():
    for line in (HERE / "expressions.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        is_template = "{%" in line or line.startswith("{{ ") or "{#" in line or "{{ 1 -}}" in line
        yield line.replace("\\n", "\n") if is_template and "'" not in line else line if is_template else "{{ " + line + " }}"


def expressions():
    made = environment()
    return [{"template": source, **rendered(made, source, {})} for source in templates()]


def renderings(directory=HERE / "templates", made=None):
    made = made or environment()
    chats = json.loads((HERE / "chats.json").read_text())
    out = []
    for path in sorted(directory.glob("*.jinja")):
        for chat in chats:
            out.append({"template": path.stem, "chat": chat["name"], **rendered(made, path.read_text(), chat["variables"])})
    return out


def names():
    """What the expressions have to name: filters, tests, globals, and methods of Python's types."""
    filters = set(jinja2.defaults.DEFAULT_FILTERS) - {"urlize"}
    tests = set(jinja2.defaults.DEFAULT_TESTS)
    methods = {m for kind in (str, list, dict, tuple, int, float) for m in dir(kind) if not m.startswith("_")}
    # Refused by the sandbox, since they change what they are called on; and a newer Python's.
    methods -= {"append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"}
    methods -= {"from_number"}
    return filters, tests, methods, set(jinja2.defaults.DEFAULT_NAMESPACE) - {"lipsum"}


def uncovered():
    text = "\n".join(templates())
    filters, tests, methods, functions = names()
    for name in filters:
        if not re.search(r"\|\s*" + re.escape(name) + r"\b", text):
            yield f"filter {name}"
    for name in tests:
        if not re.search(r"\bis (not )?" + re.escape(name) + r"(?![\w=])", text):
            yield f"test {name}"
    for name in methods:
        if not re.search(r"\." + name + r"\b", text):
            yield f"method {name}"
    for name in functions:
        if not re.search(r"\b" + name + r"\(", text):
            yield f"function {name}"


def random_templates(seed, count):
    """What Jinja2 makes of random templates, without those that show where a value lies."""
    # Python's compiler advises on the code that Jinja2 makes.
    warnings.simplefilter("ignore", SyntaxWarning)
    made = environment()
    for source in jinja_random.templates(seed, count):
        entry = {"template": source, **rendered(made, source, {})}
        if not re.search(r" at 0x[0-9a-f]{6}", entry.get("text", "")):
            yield entry


def main():
    if "--random" in sys.argv:
        for entry in random_templates(*map(int, sys.argv[-2:])):
            print(json.dumps(entry))
        return
    if "--templates" in sys.argv:
        # Templates that are written for llama.cpp change lists, which the daemon allows too.
        made = environment(jinja2.sandbox.SandboxedEnvironment)
        print(json.dumps(renderings(pathlib.Path(sys.argv[-1]), made), ensure_ascii=False))
        return
    check = "--check" in sys.argv
    wrong = [f"in no expression: {name}" for name in uncovered()]
    for name, made in (("expressions.json", expressions()), ("renderings.json", renderings())):
        text = "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in made) + "\n]\n"
        path = HERE / name
        if not check:
            path.write_text(text)
        elif path.read_text() != text:
            wrong.append(f"{path} is not what Jinja2 {jinja2.__version__} makes: run {pathlib.Path(__file__).name}")
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(bool(wrong))


main()
