"""The one error type that users are meant to read."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave is wrong (an option, a file, a request).

    The message names the thing, the value found, the value expected, and what to do.
    Entry points print it once, without a traceback, and every rank exits with code 2.
    Any other exception is a fault of the program: its traceback is printed and the job aborted.
    """
