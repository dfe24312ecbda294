"""Triton's interpreter, made faster.

It replaces the language's functions by its own whenever one kernel function calls another, which
looks at everything in the language, though all have been replaced since the launch: that took
40 percent of its time.
"""

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def replace_once() -> None:
    """The language's functions, at each launch"""
    inner: Any = interpreter
    if not hasattr(inner, "_LangPatchScope"):  # of another version
        return
    patch, launch = inner._patch_lang, inner.GridExecutor.__call__
    seen: dict[Any, frozenset[str]] = {}  # by function
    replaced: set[frozenset[str]] = set()

    def once(fn: Any) -> Any:
        if fn not in seen:
            modules = [x for x in fn.__globals__.values() if inspect.ismodule(x)]
            seen[fn] = frozenset(x.__name__ for x in modules if x in (tl, tl.core))
        if seen[fn] in replaced:
            return inner._LangPatchScope()  # nothing to put back
        replaced.add(seen[fn])
        return patch(fn)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:  # what was replaced has been put back
            replaced.clear()

    inner._patch_lang, inner.GridExecutor.__call__ = once, launched
