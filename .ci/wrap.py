#!/usr/bin/env python3
"""Wraps lines of comments and of Markdown that are longer than 100 characters.

rustfmt leaves comments alone, and a test (tests/tests/tidy) rejects long ones. This applies the
test's rule: rows of tables and fenced code in Markdown keep their length.

    .ci/wrap.py            wrap the files that git tracks, and print each one that changed
    .ci/wrap.py --check    print the long lines, and exit with 1 if there are any
"""

import re
import subprocess
import sys
from pathlib import Path

COLUMNS_MAX = 100
SLASHES = {".rs", ".hip", ".h", ".proto"}
HASHES = {".py", ".sh", ".toml", ".service", ".socket", ".conf", ".yml"}
# Not the project's own words, or data.
SKIPPED = re.compile(r"(^|/)(fixtures|node_modules|target)/")


def prefix_of(line, suffix):
    """What each line of this comment or paragraph begins with; None for a line that stays."""
    if suffix == ".md":
        item = re.match(r"( *)((?:[-*+]|\d+\.) )?", line)
        if line.lstrip().startswith("|"):
            return None
        return item.group(1) + " " * len(item.group(2) or ""), item.end()
    mark = r"( *)(//[/!]?|)( *)((?:[-*+]|\d+\.) )?" if suffix in SLASHES else r"( *)(#+)( *)((?:[-*+]|\d+\.) )?"
    found = re.match(mark, line)
    if not found or not found.group(2) or line[found.end() :].startswith("|"):
        return None
    indent, comment, space, item = found.groups()
    return indent + comment + space + " " * len(item or ""), found.end()


def wrap(line, suffix):
    """The lines that one long line becomes."""
    place = prefix_of(line, suffix)
    if place is None:
        return [line]
    prefix, begin = place
    first, words = line[:begin], line[begin:].split(" ")
    lines, current = [], first + words[0]
    for word in words[1:]:
        if len(current) + 1 + len(word) > COLUMNS_MAX:
            lines.append(current)
            current = prefix + word
        else:
            current += " " + word
    return [*lines, current]


def continues(line, prefix, suffix):
    """Whether a line is more of the comment or paragraph whose lines begin with this prefix."""
    rest = line[len(prefix) :]
    if not line.startswith(prefix) or not rest or rest[0] in " |":
        return False
    marks = r"[-*+] |\d+\. |```|[#>]" if suffix == ".md" else r"[-*+] |\d+\. |```|#|\*Invariant"
    return not re.match(marks, rest)


def wrapped(path, text):
    """The text with its long lines wrapped, and the numbers of those lines."""
    lines, long, in_fence = [], [], False
    rest = text.split("\n")
    numbers = list(range(1, len(rest) + 1))
    while rest:
        line, number = rest.pop(0), numbers.pop(0)
        if path.suffix == ".md" and line.lstrip().startswith("```"):
            in_fence = not in_fence
        made = [line] if in_fence or len(line) <= COLUMNS_MAX else wrap(line, path.suffix)
        if made != [line]:
            long.append(number)
            prefix, _ = prefix_of(line, path.suffix)
            # What is over goes to the front of the next line, if that goes on with the sentence.
            if rest and continues(rest[0], prefix, path.suffix):
                rest[0] = made.pop() + " " + rest[0][len(prefix) :]
        lines += made
    return "\n".join(lines), long


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True, text=True,
    ).stdout
    found = False
    for name in filter(None, listed.split("\0")):
        path = Path(name)
        known = path.suffix in SLASHES | HASHES | {".md"}
        if not known or SKIPPED.search(name) or not path.is_file() or path.is_symlink():
            continue
        text = path.read_text(encoding="utf-8")
        better, long = wrapped(path, text)
        for number in long:
            found = True
            print(f"{name}:{number}: {'longer than 100 characters' if check else 'wrapped'}")
        if long and not check:
            path.write_text(better, encoding="utf-8")
    sys.exit(1 if check and found else 0)


if __name__ == "__main__":
    main()
