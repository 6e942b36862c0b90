# SPDX-License-Identifier: Apache-2.0
"""Find the answer in a model's text."""


def last_boxed(text: str) -> str | None:
    r"""The contents of the last `\boxed{...}` whose braces balance, or None.

    Braces may be nested to any depth; `\{` and `\}` are printed characters and do not count.
    """
    start = text.rfind(r"\boxed{")
    while start >= 0:
        begin = start + len(r"\boxed{")
        depth, escaped = 1, False
        for end in range(begin, len(text)):
            if not escaped:
                depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[begin:end]
            escaped = text[end] == "\\" and not escaped
        start = text.rfind(r"\boxed{", 0, start)
    return None
