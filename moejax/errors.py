"""The one exception for things the person at the keyboard can mend."""


class UserError(Exception):
    """One clear sentence about bad input, with the way out.

    Commands print the sentence without a traceback and exit with code 2 (`moejax.cli.run`). Everything else that
    is raised is a fault of the program and keeps its traceback.
    """
