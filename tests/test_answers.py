"""The last boxed answer, by hand."""

import pytest

from answers import last_boxed


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\ b}", r"a \\ b"),
        (r"\boxed{7} and then \boxed{8", "7"),  # the last one was never closed
        (r"\boxed{\boxed{5}}", "5"),
        ("\\boxed{1\n+ 1}", "1\n+ 1"),
        ("no box", None),
        (r"\boxed 3", None),
        (r"\boxed{3", None),
        ("", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer
