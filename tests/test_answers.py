"""The last boxed answer and what is right, by hand."""

import pytest

from answers import is_right, last_boxed


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
        (r"\boxed {3}", "3"),
        (r"\boxed 3", None),
        (r"\boxed{3", None),
        (r"{ \boxed{3}", "3"),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{" * 100_000, None),
        (r"\boxed{" * 2000 + "5" + "}" * 2000, "5"),
        ("", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


# Answer and truth, on a line each.
RIGHT = r"""
\dfrac{1}{2} | \frac{1}{2}
\tfrac12 | \frac{1}{2}
1/2 | \frac{1}{2}
0.5 | \frac{1}{2}
-\frac{1}{2} | \frac{-1}{2}
\frac{\frac{1}{2}}{3} | \frac{1}{6}
1.8 | 1\frac{4}{5}
\frac{275}{2} | 137 \frac{1}{2}
0.0000672 | .0000672
6.72 \times 10^{-5} | .0000672
(3,4] | (3,4]
\left( -\infty, 2\right) \cup (3, \infty) | (-\infty, 2) \cup (3, \infty)
[-2,7] | x \in [-2,7]
-2 \le x \le 7 | x \in [-2,7]
x > 2 | (2,\infty)
\{0\} \cup [1,2] \cup (3,4) | [1,2] \cup \{0\} \cup (3,4)
\{2,1\} | \{1,2\}
1,2 | \{2,1\}
7, 5, 3 | 3, 5, 7
x=1 \text{ or } x=-2 | 1,-2
(3, \pi/2) | \left( 3, \frac{\pi}{2} \right)
(6, 31, -1) | (6,31,-1)
\begin{bmatrix} -\frac{1}{3} \\ 2 \end{bmatrix} | \begin{pmatrix} -1/3 \\ 2 \end{pmatrix}
5 \text{ cm} | 5
5 | 5 \text{ cm}
864 \text{ square inches} | 864 \mbox{ inches}^2
\frac{270}{7}^\circ | \frac{270}7\text{ degrees}
18 dollars | 18
10 percent | 10
10 \text{ percent} | 0.1
1.5 million | 1,500,000
5 \text{ million} | 5000000
5\\ | 5
ABC | ABC
5 \text{ h } 30 \text{ min} | 5 \text{ h } 30 \text{ min}
\text{Friday} | \text{Friday}
friday | \text{Friday}
C | \text{(C)}
\textbf{(C)} | \text{(C)}
50\% | 50
50 | 50\%
12.5\% | 12.5
50\% | 0.5
90 | 90^\circ
90° | 90^{\circ}
25 | 025
042 | 42
42. | 42
1,234 | 1234
1234 | 1{,}234
1\,234 | 1234
1 234 567 | 1,\!234,\!567
\$32,348 | \$32,\!348
18.9 | \$18.90
x=5 | 5
5 | x = 5
2x+3 | y = 2x + 3
-5x + 7y - 4 = 0 | 5x - 7y + 4 = 0
1+\sqrt{19}, 1-\sqrt{19} | 1 \pm \sqrt{19}
1 \pm \sqrt{5}, -2 | \{1\pm\sqrt{5},-2\}
\sqrt{8} | 2\sqrt2
\frac{1}{\sqrt{3}} | \frac{\sqrt{3}}{3}
\frac{2\pi}{3} | \frac{2}{3}\pi
-5i + 6 | 6 - 5i
2516_{8} | 2516_8
2516 | 2516_8
-q + p | p - q
(b+2)(a+5) | ab + 2a + 5b + 10
\frac{1}{\tan x} | \cot x
2^{10} | 1024
"""

WRONG = r"""
\frac{3}{56} | \frac{56}{3}
0.333 | \frac{1}{3}
0.0000671 | .0000672
\frac{4}{5} | 1\frac{4}{5}
(3,4) | (3,4]
[3,4] | (3,4]
(3,4) | [3,4]
(-2,7) | x \in [-2,7]
(0,36) | (0,9) \cup (9,36)
\{1,3\} | \{1,2\}
\{1\} | \{1,2\}
(1,2) | \{1,2\}
\{2,1\} | (2,1)
(2,1) | (1,2)
3,2,1 | (1,2,3)
\begin{pmatrix} 2 \\ 1 \end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{pmatrix} 1 & 2 \end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
4 \text{ cm} | 5 \text{ cm}
5 \text{ h } 30 \text{ min} | 5
\text{Monday} | \text{Friday}
1 million | 1
5 \text{ million} | 5
50 | 50 \text{ thousand}
CBA | ABC
B | \text{(C)}
5\% | 50\%
50 | 0.5
45^\circ | 90^\circ
52 | 025
1,2 | 12
(1,234) | 1234
1\,234 | 235
1 2345 | 12345
x=6 | 5
y=5 | x=5
1 + \sqrt{19} | 1 \pm \sqrt{19}
2 | \pm 2
1.414 | \sqrt{2}
7 | 7\pi
3.14 | \pi
5 | -5
6 + 5i | 6 - 5i
52_9 | 52_8
2517_8 | 2516_8
q - p | p - q
2n + 2 | 2k + 2
\frac{1}{0} | 5
\frac{1 | 5
abc | 42
"""


def pairs(lines):
    return [tuple(line.split(" | ")) for line in lines.strip().splitlines()]


@pytest.mark.parametrize("answer, truth", pairs(RIGHT))
def test_a_right_answer(answer, truth):
    assert is_right(answer, truth)


@pytest.mark.parametrize("answer, truth", pairs(WRONG))
def test_a_wrong_answer(answer, truth):
    assert not is_right(answer, truth)


@pytest.mark.parametrize("answer", ["", "  ", ".", r"\text{}"])
def test_an_empty_box_is_wrong(answer):
    assert not is_right(answer, "42")


@pytest.mark.parametrize(
    "truth",
    [
        r"10,\! 222,\! 333,\! 100",
        r"\left[ \frac{\pi^2}{8}, \frac{5 \pi^2}{4} \right]",
        r"\left(\frac{3}{5},\frac{8}{3}\right]",
        r"\frac9{19}",
        r"\frac 59",
        r"15\mbox{ cm}^2",
        r"7.4 \text{ cents}",
        r"3x - 7y + 11z + 4 = 0",
        r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}",
        r"(2,12) \cup (12,\infty)",
        r"4210_{5}",
        r"\{1\pm\sqrt{5},-2\}",
    ],
)
def test_a_truth_equals_itself_and_not_others(truth):
    assert is_right(truth, truth) and is_right(f" {truth} ", truth)
    assert not is_right("12345", truth) and not is_right(truth, "12345")


def test_no_verdict_is_no_wrong_answer(monkeypatch):
    """What takes too long is told as such."""
    import math_verify

    def slow(*_, **__):
        raise math_verify.errors.TimeoutException("Operation timed out!")

    monkeypatch.setattr(math_verify, "verify", slow)
    with pytest.raises(TimeoutError, match=r"no verdict on '9\^\{9\^\{9\}\}' within seconds"):
        is_right("9^{9^{9}}", "5")
