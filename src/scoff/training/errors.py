"""What can go wrong in a way that a person should read about in one line.

The command prints the message of any of these and ends with its exit code.
"""


class ScoffError(Exception):
    exit_code = 1


class UsageError(ScoffError):
    """What was asked for cannot be done; nothing was changed."""

    exit_code = 2


class DivergedError(ScoffError):
    """The loss or a gradient is not finite."""


class StorageError(ScoffError):
    """A file could not be written; what was there before still is."""


class StoppedError(ScoffError):
    """The command was asked to stop, and did in good order: a run saved its state."""

    def __init__(self, message: str, *, by_keyboard: bool = False):
        super().__init__(message)
        # what shells report for Ctrl-C, and EX_TEMPFAIL, which asks schedulers to try again
        self.exit_code = 130 if by_keyboard else 75
