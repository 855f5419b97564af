"""A name full of control characters, and the pattern that finds them in what is printed."""

import re

NASTY = "a\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202eb"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
