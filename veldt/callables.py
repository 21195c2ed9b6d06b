"""Names for functions, so that a config file can hold them: `module:attribute`.

A function that cannot be imported by name (a lambda, or one of an interactive session) is known only to this process, under
the name `local:qualname`.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from veldt.errors import UserError

LOCAL = "local"
_local: dict[str, Callable[..., Any]] = {}
_unloaded: dict[str, Callable[[], Callable[..., Any]]] = {}  # loaders of functions of the process that started this one
_allowed: Collection[str] | None = None  # the names that may be imported; None: all


def name_of(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__name__)
    if module and module != "__main__" and "<" not in name and find(f"{module}:{name}") is function:
        return f"{module}:{name}"
    taken = [key for key in (*_local, *_unloaded) if key == name or key.startswith(f"{name}-")]
    for key in taken:
        if _local.get(key) is function:
            return f"{LOCAL}:{key}"
    key = f"{name}-{len(taken) + 1}" if taken else name  # two lambdas have one qualname
    _local[key] = function
    return f"{LOCAL}:{key}"


def local() -> dict[str, Callable[..., Any]]:
    for name in [*_unloaded]:
        find(f"{LOCAL}:{name}")
    return dict(_local)


def is_code(name: str) -> bool:
    """Whether using this name imports a module; a function that this process was given does not."""
    return name.rpartition(":")[0] not in ("", LOCAL)


@dataclass(frozen=True)
class NotPortable:
    """Replaces a function that cannot be sent to another process; raises a UserError when it is called."""

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError(
            f"{self.name!r} refers to something that cannot be sent to another process, such as an open file or a lock; "
            "create that inside the function, name an importable function (module:function), or use --runtime inline."
        )


def install(functions: dict[str, Callable[[], Callable[..., Any]]]) -> None:
    """Registers functions of the process that started this one. Each is loaded on first use: it may refer to modules,
    such as torch, that this process does not need."""
    _unloaded.update(functions)


@contextlib.contextmanager
def only(names: Collection[str]) -> Iterator[None]:
    """Within it, `find` imports nothing but these: names that come from elsewhere are not trusted."""
    global _allowed
    before, _allowed = _allowed, names
    try:
        yield
    finally:
        _allowed = before


def find(name: str) -> Callable[..., Any] | None:
    """The callable that `module:attribute` names; None if the module has no such attribute."""
    if _allowed is not None and name not in _allowed:
        raise UserError(f"{name!r} is code, and importing it was not allowed here.")
    module, _, attribute = name.rpartition(":")
    if module == LOCAL:
        if attribute in _unloaded:
            _local[attribute] = _unloaded.pop(attribute)()
        if attribute not in _local:
            raise UserError(
                f"{name!r} was passed from Python and cannot be imported; start this run from Python again, or put the "
                "function in a module and name it module:function."
            )
        return _local[attribute]
    if not module or module.startswith("."):
        raise UserError(f"{name!r} must be module:callable, as in my_package.my_module:make.")
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is None and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # a module beside the user, whom no installed one precedes
        found: Any = importlib.import_module(module)
    except Exception as error:  # importing a module may raise anything
        raise UserError(
            f"{name!r}: {module} cannot be imported ({type(error).__name__}: {error}); is it on the Python path?"
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return found if callable(found) else None
