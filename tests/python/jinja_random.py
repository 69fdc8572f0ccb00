"""Random templates: expressions of all types with their operators, filters, tests and methods, and
statements with white space of all kinds around them. They keep to what the daemon's Jinja has:
docs/internals/chat-templates.md lists the differences, and tests/reference/differences.json the
words for each."""

import random

TEXTS = [
    "", "a", "b", "abc", "Abc dEf", " x y ", "a,b,,c", "1", "-12", "3.5", "0x1f", "\\n", "a\\nb\\n", "a\\r\\nb", "é", "ß", "İ",
    "ǅ", "世界", "😀 x", "<b>&'", "%s", "%d%%", "{}", "{0}", "\\t", "tool_call", "</think>", "x-y_z w", "A1b2", "١٢", "½",
    "e\\u0301", "\\u2028", "\\xa0q\\xa0", "ﬁ", "ΑΣ", "[INST]", "a.b.c", "AbC", "hello world foo", "\\x00", "\\x7f", '"',
    "\\\\", "true", "+7", " 42 ", "_", "1_0",
]
TESTS = (
    "defined undefined none string mapping sequence iterable number integer float boolean true false callable lower upper escaped"
).split()
ITEMS = "[{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'Y'}, {'a': 1, 'b': 'X'}]"


class Writer:
    """Writes templates, the same ones of the same seed. The depth of what is written is bounded by
    the argument of each method."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def one(self, *choices):
        return self.draw.choice(choices)

    def chance(self, share):
        return self.draw.random() < share

    def plain_text(self):
        text = self.one(*TEXTS)
        return f'"{text}"' if "'" in text else f"'{text}'"

    def plain_int(self):
        return self.one("0", "1", "2", "3", "5", "7", "10", "-1", "-2", "-7", "255", "1000", "1234567", "99999999999", "1_000", "true")

    def plain_float(self):
        return self.one("0.0", "1.0", "0.5", "1.5", "-2.5", "3.14159", "2.675", "1e3", "1e16", "1e-5", "1e22", "123456.789", "0.1", "-0.0", "100.0")

    def int(self, depth):
        if depth <= 0 or self.chance(0.3):
            return self.plain_int()
        below = depth - 1
        return self.one(
            lambda: f"({self.int(below)} {self.one('+', '-', '*', '//', '%')} {self.int(below)})",
            lambda: f"({self.one('2', '3', '7', '10', '1.5')} ** {self.one('0', '2', '3', '-1', '0.5')})",
            lambda: f"({self.any(below)}|length)",
            lambda: f"({self.text(below)}|int({self.one('', '7', 'none', 'base=16')}))",
            lambda: f"({self.number(below)}|abs)",
            lambda: f"{self.text(below)}.{self.one('find', 'rfind', 'count')}({self.plain_text()}{self.one('', ', 1', ', -2', ', 0, 3', ', 1, none')})",
            lambda: f"([{self.plain_int()}, {self.plain_int()}]|{self.one('sum', 'min', 'max', 'first', 'last')})",
            lambda: f"{self.text(below)}|wordcount",
            lambda: f"({self.int(below)} if {self.truth(below)} else {self.int(below)})",
            lambda: f"({self.float(below)}|int)",
            lambda: f"{self.list(below)}.{self.one('count', 'index')}({self.any(0)})",
            lambda: f"-{self.int(below)}",
            lambda: f"{self.list(below)}[{self.one('0', '-1', '1')}]",
        )()

    def float(self, depth):
        if depth <= 0 or self.chance(0.3):
            return self.plain_float()
        below = depth - 1
        rounding = self.one("", "1", "2", "-1", "0", "'x'", "1, 'floor'", "2, 'ceil'", "method='ceil'")
        return self.one(
            lambda: f"({self.number(below)} {self.one('+', '-', '*', '/', '//', '%')} {self.number(below)})",
            lambda: f"({self.number(below)}|round({rounding}))",
            lambda: f"({self.text(below)}|float)",
            lambda: f"({self.any(below)}|float({self.float(0)}))",
            lambda: f"({self.int(below)} / {self.int(below)})",
            lambda: f"(-{self.float(below)})",
        )()

    def number(self, depth):
        return self.one(self.int, self.float)(depth)

    def truth(self, depth):
        if depth <= 0 or self.chance(0.15):
            return self.one("true", "false", "True", "False")
        below = depth - 1
        no = self.one("", "not ")
        of_int = self.one("odd", "even", "divisibleby 3", "divisibleby(2)", "eq 1", "gt 2", "lt(3)", "in [1, 2, 3]", "ge 2", "ne 0")
        affix = self.one(self.plain_text(), f"({self.plain_text()}, {self.plain_text()})")
        kind = "alnum alpha ascii decimal digit identifier lower numeric printable space title upper".split()
        return self.one(
            lambda: f"({self.any(below)} {self.one('==', '!=')} {self.any(below)})",
            lambda: f"({self.number(below)} {self.one('<', '<=', '>', '>=', '==')} {self.number(below)})",
            lambda: f"({self.text(below)} {self.one('<', '>', '<=', 'in', 'not in', '==')} {self.text(below)})",
            lambda: f"({self.any(below)} {self.one('in', 'not in')} {self.one(self.list, self.dict)(below)})",
            lambda: f"(not {self.any(below)})",
            lambda: f"({self.any(below)} {self.one('and', 'or')} {self.any(below)})",
            lambda: f"({self.any(below)} is {no}{self.one(*TESTS)})",
            lambda: f"({self.int(below)} is {no}{of_int})",
            lambda: f"{self.text(below)}.{self.one('startswith', 'endswith')}({affix}{self.one('', ', 1', ', -3', ', 0, 2')})",
            lambda: f"{self.text(below)}.is{self.one(*kind)}()",
            lambda: f"({self.number(below)} < {self.number(below)} {self.one('<', '==', '!=', '>')} {self.number(below)})",
        )()

    def text(self, depth):
        if depth <= 0 or self.chance(0.25):
            return self.plain_text()
        below = depth - 1
        text = lambda: self.text(below)
        plain = self.plain_text
        name = self.one("upper", "lower", "title", "capitalize", "trim", "string", "striptags", "urlencode", "reverse", "pprint")
        indent = self.one("", "2", "4, true", "1, first=true", "3, blank=true", "2, true, true", plain())
        cut = self.one("3", "5, true", f"4, false, {plain()}", "3, true, '', 0", "255", "7, leeway=0", "5, end='.'")
        wrap = self.one("3", "5", "7, false", f"4, true, {plain()}", "10, break_on_hyphens=false", "2")
        json = self.one(
            "", "", "indent=2", "indent=4, ensure_ascii=false", "ensure_ascii=true", "true", "separators=(',', ':')", "sort_keys=true",
            "indent=1, separators=(', ', '='), sort_keys=true", "indent=none", f"indent={plain()}",
        )
        method = self.one("upper", "lower", "title", "capitalize", "strip", "lstrip", "rstrip", "swapcase", "casefold", "expandtabs")
        stripped = self.one("strip", "lstrip", "rstrip", "removeprefix", "removesuffix")
        return self.one(
            lambda: f"({text()} ~ {self.any(below)})",
            lambda: f"({text()} + {text()})",
            lambda: f"({text()}|{name})",
            lambda: f"({text()}|replace({plain()}, {plain()}{self.one('', ', 1')}))",
            lambda: f"({text()}|indent({indent}))",
            lambda: f"({text()}|truncate({cut}))",
            lambda: f"({text()}|center({self.one('5', '10', '11', '3')}))",
            lambda: f"({text()}|wordwrap({wrap}))",
            lambda: f"({self.any(below)}|tojson({json}))",
            lambda: f"{text()}.{method}()",
            lambda: f"{text()}.{stripped}({plain()})",
            lambda: f"{text()}.{self.one('center', 'ljust', 'rjust')}({self.one('3', '6', '9')}{self.one('', ', ' + plain())})",
            lambda: f"{text()}.zfill({self.one('1', '4', '7', '-1')})",
            lambda: f"{text()}.replace({plain()}, {plain()}{self.one('', ', 1', ', -1', ', 0')})",
            lambda: f"{text()}[{self.slice()}]",
            lambda: f"{text()}[{self.one('0', '-1', '1', '5', '-9')}]",
            lambda: f"{text()}.join({self.one(f'[{plain()}, {plain()}]', self.list(below), text())})",
            lambda: f"({self.list(below)}|join({self.one('', plain(), 'd=' + plain(), plain() + ', attribute=' + repr('a'))}))",
            lambda: f"({text()} * {self.one('0', '1', '2', '3', '-1')})",
            lambda: f"({text()} if {self.truth(below)} else {text()})",
            lambda: f"({self.any(below)}|string)",
            lambda: f"({self.missing()}|default({text()}{self.one('', ', true')}))",
            lambda: self.printf(depth),
            lambda: self.format(depth),
            lambda: f"({self.number(below)}|filesizeformat({self.one('', 'true')}))",
            lambda: f"{text()}.translate({{97: 'x', 98: none}})",
            lambda: f"{text()}.{self.one('partition', 'rpartition')}({plain()})[{self.one('0', '1', '2')}]",
            lambda: f"({text()}|format({self.any(0)}))",
            lambda: f"({text()} % {self.any(0)})",
            lambda: f"{self.dict(below)}.get({plain()}, {text()})",
        )()

    def printf(self, depth):
        kind = self.one(*"diusraxXoeEfFgGc")
        flags = "".join(self.draw.sample("-+ 0#", self.draw.randrange(3)))
        width, precision = self.one("", "", "5", "12", "*"), self.one("", "", ".0", ".2", ".10", ".*", ".")
        value = self.one("65", "'z'", "128512") if kind == "c" else (self.any if kind in "sra" else self.int if kind in "xXo" else self.number)(depth - 1)
        values = ["7"] * (width == "*") + ["3"] * (precision == ".*") + [value]
        form = f"'[%{flags}{width}{precision}{kind}]'"
        return f"({form} % ({', '.join(values)},))" if self.chance(0.5) else f"({form}|format({', '.join(values)}))"

    def format(self, depth):
        fill = self.one("", "", "", "*<", "x>", "^", "=", "0^", ">", "<", "é^")
        sign, alternate, zero = self.one("", "", "+", "-", " "), self.one("", "", "#"), self.one("", "", "0")
        width, group, precision = self.one("", "", "4", "10"), self.one("", "", "", ",", "_"), self.one("", "", ".0", ".2", ".8")
        spec, value = self.one(
            lambda: (sign + alternate + zero + width + group + self.one(*" dxXbocn").strip(), self.int(depth - 1)),
            lambda: (sign + alternate + zero + width + group + precision + self.one(*" fegG%EFn").strip(), self.number(depth - 1)),
            lambda: (sign + width + precision + self.one("", "s"), self.text(depth - 1)),
        )()
        lead = self.one("", "0", "k")
        conversion = self.one("", "", "", "!r", "!s", "!a")
        return f"'<{{{lead}{conversion}:{fill}{spec}}}>'.format({'k=' if lead == 'k' else ''}{value})"

    def slice(self):
        bound = lambda: self.one("", "", "0", "1", "2", "-1", "-2", "5", "-9", "none")
        return f"{bound()}:{bound()}" + (f":{self.one('', '1', '2', '-1', '-2', '3')}" if self.chance(0.4) else "")

    def missing(self):
        return self.one("missing", "{}.x", "{'a': 1}.b", "[1][7]")

    def list(self, depth):
        below = depth - 1
        many = lambda of, most: "[" + ", ".join(of() for _ in range(self.draw.randrange(1, most))) + "]"
        if depth <= 0 or self.chance(0.35):
            return self.one(
                lambda: "[]",
                lambda: many(self.plain_int, 6),
                lambda: many(self.plain_text, 6),
                lambda: many(lambda: self.any(below), 4),
                lambda: f"({self.any(below)}, {self.any(below)})",
                lambda: f"range({self.one('3', '0', '5', '1, 4', '5, 0, -2', '2, 9, 3')})",
                lambda: ITEMS,
                lambda: "[{'a': {'b': 2}}, {'a': {'b': 1}}]",
                lambda: many(self.plain_float, 4),
            )()
        some = lambda: self.list(below)
        order = self.one("", "reverse=true", "true", "case_sensitive=true", "attribute='a'", "attribute='a,b'", "false, true")
        mapped = self.one(
            "'upper'", "'string'", "'length'", "'int'", "'tojson'", "'trim'", "'list'", "'first'", "'abs'", "attribute='a'",
            "attribute='a.b'", "attribute='a', default=0", "'default', 5", "attribute=0", "'join', '-'",
        )
        chosen = self.one(
            "", "'odd'", "'string'", "'none'", "'defined'", "'number'", "'mapping'", "'iterable'", "'lower'", "'true'", "'gt', 1",
            "'in', [1, 2]", "'eq', 1", "'divisibleby', 2",
        )
        attribute = self.one("'a'", "'b'", "'b', 'defined'", "'a', 'eq', 1", "'a', 'none'", "'b', 'in', 'xyz'")
        split = self.one(
            "split()", "split(',')", "split(none, 1)", "rsplit(' ', 1)", "splitlines()", "splitlines(true)", "partition('b')",
            "rpartition(' ')", f"split({self.plain_text()})", "rsplit()", "rsplit(maxsplit=1)",
        )
        return self.one(
            lambda: f"({some()}|sort({order}))",
            lambda: f"({some()}|map({mapped})|list)",
            lambda: f"({some()}|{self.one('select', 'reject')}({chosen})|list)",
            lambda: f"([{{'a': 1, 'b': 'x'}}, {{'a': 2}}, {{'a': none, 'b': ''}}]|{self.one('selectattr', 'rejectattr')}({attribute})|list)",
            lambda: f"({some()}|unique({self.one('', 'true', 'attribute=' + repr('a'))})|list)",
            lambda: f"({some()}|reverse|list)",
            lambda: f"({some()}|batch({self.one('2', '3, 0', '1', '2, ' + self.plain_text())})|list)",
            lambda: f"({some()}|slice({self.one('2', '3, 0', '1')})|list)",
            lambda: f"{some()}[{self.slice()}]",
            lambda: f"({some()} + {some()})",
            lambda: f"({some()} * {self.one('0', '1', '2')})",
            lambda: f"{self.text(below)}.{split}",
            lambda: f"({self.text(below)}|list)",
            lambda: f"({self.dict(below)}|{self.one('list', 'items|list', 'dictsort', 'dictsort(reverse=true)', 'dictsort(false, ' + repr('value') + ')')})",
            lambda: f"({self.dict(below)}.{self.one('keys', 'values', 'items')}()|list)",
            lambda: f"({some()}|groupby({self.one('', 'attribute=')}{self.one(repr('a'), repr('b'), '0', repr('a') + ', default=0')}))",
            lambda: f"({some()} if {self.truth(below)} else {some()})",
            lambda: f"({self.missing()}|default({some()}))",
            lambda: f"(dict({self.dict(below)}, z=1)|list)",
            lambda: f"{some()}.copy()",
            lambda: f"[{self.any(below)}, {self.any(below)}]",
        )()

    def dict(self, depth):
        below = depth - 1
        if depth <= 0 or self.chance(0.6):
            keys = [
                self.one("'a'", "'b'", "'A'", "'c'", "'x y'", "1", "none", "true", "'é'", "1.5", "'type'", "(1, 2)", "'items'")
                for _ in range(self.draw.randrange(4))
            ]
            return "{" + ", ".join(f"{key}: {self.any(below)}" for key in keys) + "}"
        return self.one(
            lambda: f"dict({self.one('', 'a=' + self.any(below), self.dict(below) + ', b=' + self.any(below), '[(' + repr('p') + ', 1)]')})",
            lambda: f"{self.dict(below)}.copy()",
            lambda: f"({self.dict(below)} if {self.truth(below)} else {self.dict(below)})",
            lambda: f"dict({self.dict(below)}.items()|list)",
        )()

    def any(self, depth):
        kinds = [self.text] * 32 + [self.int] * 18 + [self.float] * 10 + [self.truth] * 10 + [self.list] * 15 + [self.dict] * 9
        kinds += [lambda _: "none"] * 3 + [lambda _: self.missing()] * 3
        return self.one(*kinds)(depth)

    def space(self):
        return self.one("", "", "", " ", "\n", "  \n  ", "\n\n", " x ", "\n  y\n", "z\n")

    def tag(self, body):
        return f"{self.one('{%', '{%', '{%', '{%-', '{%-', '{%+')} {body} {self.one('%}', '%}', '%}', '-%}', '-%}', '+%}')}"

    def out(self, expression):
        return f"{self.one('{{', '{{', '{{-')} {expression} {self.one('}}', '}}', '-}}')}"

    def variable(self):
        return self.one(
            "x", "y", "ns.v", "item", "loop.index", "loop.last", "loop.first", "loop.length", "loop.revindex0", "loop.previtem",
            "loop.nextitem", "loop.cycle('p', 'q', 'r')", "loop.changed(x)", "loop.depth",
        )

    def body(self, depth):
        return "".join(self.space() + self.statement(depth) for _ in range(self.draw.randrange(1, 4))) + self.space()

    def loop(self, depth):
        target = self.one("x", "x", "y", "item", "x, y", "k, v")
        pairs = self.one(f"{self.dict(1)}.items()", f"{self.dict(1)}|items", "[(1, 2), (3, 4)]", self.list(1))
        items = pairs if "," in target else self.list(2)
        condition = f" if {self.one('x', 'x is odd', 'x is string', 'item', 'loop.first')}" if self.chance(0.15) else ""
        inner = self.body(depth - 1)
        if self.chance(0.2):
            leave = self.tag(self.one("break", "continue"))
            inner += self.tag(f"if {self.variable()}") + leave + self.tag("endif") + self.body(0)
        otherwise = self.tag("else") + self.body(0) if self.chance(0.3) else ""
        return self.tag(f"for {target} in {items}{condition}") + inner + otherwise + self.tag("endfor")

    def macro(self, depth):
        more = self.one("", "{{ varargs }}", "{{ kwargs }}", "{{ caller() if caller else 'n' }}")
        given = self.one("", self.any(1), f"{self.any(1)}, {self.any(1)}", f"y={self.any(1)}", "1, 2, 3", "z=3")
        made = self.tag(f"macro m(x, y={self.any(1)})") + self.body(depth - 1) + more + self.tag("endmacro") + self.out(f"m({given})")
        if self.chance(0.4):
            made += self.tag(f"call m({self.any(0)})") + self.body(depth - 1) + self.tag("endcall")
        return made

    def statement(self, depth):
        if depth <= 0:
            return self.one(lambda: self.out(self.any(1)), lambda: self.out(self.variable()), lambda: "{#- c -#}", lambda: "{# c #}")()
        tag, body = self.tag, lambda: self.body(depth - 1)
        more = lambda: (tag(f"elif {self.any(1)}") + body() if self.chance(0.3) else "") + (tag("else") + body() if self.chance(0.5) else "")
        filters = self.one("upper", "trim", "indent(2)", f"replace({self.plain_text()}, {self.plain_text()})")
        return self.one(
            *[lambda: self.out(self.any(2))] * 3,
            lambda: self.out(self.variable()),
            *[lambda: tag(f"if {self.one(self.truth(2), self.any(1), self.variable())}") + body() + more() + tag("endif")] * 2,
            *[lambda: self.loop(depth)] * 3,
            *[lambda: tag(f"set {self.one('x', 'y', 'item')} = {self.one(self.any(2), self.variable())}")] * 2,
            lambda: tag(f"set ns = namespace(v={self.any(1)})")
            + tag(f"for x in {self.list(1)}")
            + tag(f"set ns.v = {self.one('x', 'loop.index', 'ns.v', 'ns.v + x')}")
            + tag("endfor")
            + self.out("ns.v"),
            lambda: self.macro(depth),
            lambda: tag(f"set {self.one('x', 'y')}{self.one('', '|upper', '|trim', '|length')}") + body() + tag("endset"),
            lambda: tag(f"filter {filters}") + body() + tag("endfilter"),
            lambda: tag(f"with x = {self.any(1)}, y = {self.one('x', self.any(1))}") + body() + tag("endwith"),
            lambda: tag("generation") + body() + tag("endgeneration"),
            lambda: tag("raw") + self.one(" {{ a }} ", "\n{% x %}\n", " text ") + tag("endraw"),
            lambda: tag("for x in [[1, [2]], [3]] recursive")
            + self.out("loop(x) if x is iterable else x")
            + self.out(self.variable())
            + tag("endfor"),
            lambda: self.one("{#- c -#}", "{# c #}", "{#+ c +#}", "{#\n c #}\n"),
        )()


def templates(seed, count):
    writer = Writer(seed)
    for _ in range(count):
        if writer.chance(0.6):
            yield "{{ " + writer.any(writer.draw.randrange(1, 4)) + " }}"
        else:
            yield writer.body(writer.draw.randrange(1, 4))
