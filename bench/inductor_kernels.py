"""What Inductor's kernels copy: read from their generated source, recorded when they run.

A fused kernel is opaque to a profiler, and its name says little: the copies around a bucket of collectives share
kernels with arithmetic, or have no operator to be named for. The source says it exactly: a value that is loaded
and stored with nothing in between but a change of dtype is copied; a computed value that is stored is not.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._profiler import _RecordFunctionFast
from torch._inductor.codecache import PyCodeCache

# In a module that Inductor generated: a kernel's name, its language, its source.
_KERNEL = re.compile(r"^(\w+) = async_compile\.(cpp_pybinding|triton)\(.*?'''(.*?)'''", re.DOTALL | re.MULTILINE)
_SIGNATURE = {
    "cpp_pybinding": re.compile(r'extern "C"\s+void\s+kernel\((.*?)\)', re.DOTALL),
    "triton": re.compile(r"^def triton_\w+\((.*?)\):", re.DOTALL | re.MULTILINE),
}
_PARAMETER = re.compile(r"(\w+)(?: : tl\.constexpr)?\s*(?:,|$)")

# Statements that bring a value to memory (a tile on the stack, for a transposition), and those that name one.
_MEMORY = r"(?:in_ptr|out_ptr|in_out_ptr|tmp)\d+"
_STORES = (
    re.compile(r"tl\.store\((?P<to>\w+) \+ .*, (?P<value>\w+), \w+\)"),
    re.compile(r"(?P<value>\w+)\.store\((?P<to>\w+) \+.*"),
    re.compile(r"(?P<to>\w+)\[.*\] = (?P<value>.+);"),
    re.compile(rf"(?:at::vec::)?transpose_mxn<.*\((?P<value>{_MEMORY})\b.*, (?P<to>{_MEMORY})\b.*"),
)
_NAMED = re.compile(r"(?:auto )?(\w+) = ?(.*?);?")  # a value that takes several lines to compute has none on the first

# Expressions that hand on a value as it is: loads, and changes of dtype. A load at a place that was computed
# (`tmp`) is a lookup, as an embedding does, and no copy.
_PASSED_ON = (
    re.compile(r"(?:at::vec::Vectorized\w*<[^()]*>::loadu|tl\.load)\((\w+) \+(?!.*\btmp).*\)"),
    re.compile(r"(\w+)\[(?!.*\btmp).*\]"),
    re.compile(r"(?:at::vec::convert|at::vec::Vectorized|c10::convert|static_cast)<[^()]*>\((\w+)\)"),
    re.compile(r"(\w+)"),
)


class Kernel(NamedTuple):
    """What a kernel does to its arguments, by their positions."""

    copies: tuple[tuple[int, int], ...]
    """pairs of a source and a target: all of the smaller one is copied, from or to a part of the other"""
    written: tuple[int, ...]
    """arguments that are written and never read before"""


def read(source: str, language: str) -> Kernel:
    """What a kernel copies and writes.

    Args:
        source: the kernel's code as Inductor generated it.
        language: "cpp_pybinding" or "triton".
    """
    signature = _SIGNATURE[language].search(source)
    if signature is None:
        return Kernel((), ())
    parameters = _PARAMETER.findall(signature[1])
    pointers = {name: name for name in parameters if re.fullmatch(_MEMORY, name)}
    """not sizes; and other names of theirs"""
    values: dict[str, str] = {}
    """of a name, or of a tile on the stack: the pointer whose values it holds unchanged"""
    found: dict[tuple[int, int], None] = {}

    def origin(expression: str) -> str | None:
        for form in _PASSED_ON:
            if passed_on := form.fullmatch(expression):
                return values.get(passed_on[1]) or pointers.get(passed_on[1])
        return None

    for line in map(str.strip, source[signature.end() :].splitlines()):
        if stored := next(filter(None, (form.fullmatch(line) for form in _STORES)), None):
            name, value = stored["to"], origin(stored["value"])
        elif named := _NAMED.fullmatch(line):
            name, expression = named[1], re.sub(r"\.to\(tl\.\w+\)$", "", named[2])
            if expression in pointers:
                pointers[name] = pointers[expression]
                continue
            value = origin(expression)
        else:
            continue
        if name in pointers:
            if value is not None and value != pointers[name]:
                found[parameters.index(value), parameters.index(pointers[name])] = None
        elif value is not None:
            values[name] = value
        else:
            values.pop(name, None)
    written = [position for position, name in enumerate(parameters) if name.startswith("out_ptr")]
    return Kernel(tuple(found), tuple(written))


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, Kernel]]:
    """Makes every loaded kernel appear in profiles, with its arguments; gives what it does by its name there.

    Generated modules find their kernels by name when they run, so it is enough to replace the names.
    """
    found: dict[str, Kernel] = {}
    with contextlib.ExitStack() as restore:
        for number, module in enumerate(PyCodeCache.modules):
            if module.__file__ is None:
                continue
            for name, language, source in _KERNEL.findall(Path(module.__file__).read_text()):
                event = f"inductor::{number}::{name}"
                found[event] = read(source, language)
                kernel = getattr(module, name)
                restore.callback(setattr, module, name, kernel)
                setattr(module, name, _Recorded(kernel, event))
        yield found


class _Recorded:
    """A kernel that appears in profiles under a name of its own. C++ kernels are called, Triton's are run."""

    def __init__(self, kernel: Any, event: str) -> None:
        self._kernel, self._event = kernel, event

    def __call__(self, *args: Any) -> Any:
        with _RecordFunctionFast(self._event, args):
            return self._kernel(*args)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with _RecordFunctionFast(self._event, args):
            return self._kernel.run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)
