"""Signals that end a run after the step under way."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class StopRequest:
    signal: int | None = None


def stop_signals() -> list[int]:
    """Those that there are and that are not ignored on purpose, as nohup does."""
    names = ("SIGTERM", "SIGINT", "SIGHUP")
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """These end the run after the step under way; a second one ends it at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # signals are not for it
        yield request
        return
    # None: a handler that Python does not know and could not put back
    before = {n: signal.getsignal(n) or signal.SIG_DFL for n in stop_signals()}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: object) -> None:
        request.signal = number
        put_back()

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        put_back()
