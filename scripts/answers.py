# SPDX-License-Identifier: Apache-2.0
"""Find the answer in a model's text, and tell whether it is right."""

import re

# The start of a box, a brace, or an escape, which hides one.
BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# What stands between the digits of 1 234, 1\,234 and 1~234.
DIGIT_GAP = re.compile(r"(?<=\d)(?:\\[,:; ]|~|\s)+(?=\d{3}(?!\d))")
# The unit of 5 \text{ cm}^2, or of 5 dollars; \text{Friday} has no number before it.
UNIT = re.compile(
    r"(?<=\d)(?:\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?|\s+[A-Za-z]{4,}[A-Za-z ]*)$"
)
POWER = re.compile(r"(?<=\d)\s*(?:\\text\{\s*)?\b(thousand|million|billion)\b\s*\}?", re.IGNORECASE)
POWERS = {"thousand": 3, "million": 6, "billion": 9}
BASE = re.compile(r"(?<=\d)_\{?(\d+)\}?$")
LABEL = re.compile(r"[A-Z]{2,}")
SET = re.compile(r"(?:\\left)?\\\{.*\\\}$", re.DOTALL)
PAIR = re.compile(r"(?:\\left)?[(\[].*[)\]]$", re.DOTALL)  # or interval
PERCENT = re.compile(r"\\?%")
PERCENT_WORD = re.compile(r"\s*(?:\\text\{\s*percent\s*\}|percent)$")


def last_boxed(text: str) -> str | None:
    r"""The contents of the last `\boxed{...}` whose braces balance, or None.

    Braces may be nested to any depth; `\{` and `\}` are printed characters and do not count.
    """
    opened: list[tuple[int, bool]] = []  # where the contents begin, and whether of a box
    last, begin = None, -1
    for mark in BRACE.finditer(text):
        if mark[0].endswith("{") and not mark[0] == r"\{":
            opened.append((mark.end(), mark[0] != "{"))
        elif mark[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and start > begin:
                last, begin = text[start : mark.start()], start
    return last


def is_right(answer: str, truth: str) -> bool:
    r"""Whether `answer`, the contents of a box, has the value of `truth`, by math-verify.

    As in MATH, units, degrees and currency signs do not count, nor does a base that only one side
    names; 50\% is 50 as well as 0.5. Names of variables are compared without their case. Decimals
    are compared to six places. Neither the order of a list or set counts nor whether a list has
    brackets; that of a pair does.

    Raises TimeoutError if it cannot be told within seconds, as of 9^{9^9} and 5.
    """
    answer, truth = normalise(answer), normalise(truth)
    if are_of_two_kinds(answer, truth):
        return False
    pairs = {(answer, truth), (PERCENT.sub("", answer), PERCENT.sub("", truth))}
    return any(is_equal(*pair) for pair in sorted(pairs))


def normalise(text: str) -> str:
    """A box's contents without what math-verify reads wrongly."""
    text = text.strip().rstrip(".\\ ").replace("°", r"^\circ")  # "42." and "90°" it cannot read
    text = POWER.sub(lambda word: rf" \cdot 10^{POWERS[word[1].lower()]}", text)
    text = PERCENT_WORD.sub(r"\\%", text)
    text = DIGIT_GAP.sub("", text)  # a mixed number to it: 1 + 234
    return UNIT.sub("", text)  # of "5 \text{ h } 30 \text{ min}" it drops all from the first unit


def are_of_two_kinds(answer: str, truth: str) -> bool:
    """Whether the two differ by their form, which math-verify overlooks."""
    forms = [bool(SET.match(text)) - bool(PAIR.match(text)) for text in (answer, truth)]
    bases = [found[1] for found in map(BASE.search, (answer, truth)) if found]
    # A set in braces equals a pair to it, and 52_8 equals 52_9.
    # CBA equals ABC, as a product of letters.
    labels = [text for text in (answer, truth) if LABEL.fullmatch(text)]
    two_labels = len(labels) == 2 and answer != truth
    return forms in ([1, -1], [-1, 1]) or len(set(bases)) == 2 or two_labels


def is_equal(answer: str, truth: str) -> bool:
    """math-verify's verdict, for which x > 2 is (2, oo) and no error is a wrong answer."""
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    # Six places are too few where a number starts beyond the first: .0000672.
    zeros = max((len(found) for found in re.findall(r"(?<!\d)0?\.(0*)", truth)), default=0)
    options = {"allow_set_relation_comp": True, "float_rounding": 6 + zeros}
    try:
        found, wanted = (
            parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], raise_on_error=True)
            for text in (answer, truth)
        )
        return verify(wanted, found, raise_on_error=True, **options)
    except TimeoutException as error:  # a BaseException of its own
        raise TimeoutError(f"no verdict on {answer[:40]!r} within seconds") from error
