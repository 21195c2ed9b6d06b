"""Names for functions, so that a config file can hold them: `module:attribute`, or `/path/file.py:attribute`.

A function of the script that runs is known by the script's path. One that is in no file, such as a lambda or a class of a
notebook, is known only to this process, as `local:qualname`.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from veldt.errors import UserError

LOCAL = "local"
_local: dict[str, Callable[..., Any]] = {}  # by name: what cannot be imported, or is in the script that runs
_unloaded: dict[str, Callable[[], Callable[..., Any]]] = {}  # loaders of functions of the process that started this one
_allowed: Collection[str] | None = None  # the names that may be imported; None: all
_importing: list[str] = []  # files and modules whose code runs now
_files: set[str] = set()  # that were imported


class StartsRun(BaseException):
    """A file that is only imported starts a run. What it defined until then can be used."""


def name_of(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__name__)
    if module and module != "__main__" and "<" not in name and find(f"{module}:{name}") is function:
        return f"{module}:{name}"
    if module == "__main__" and "<" not in name and script() and _attribute(sys.modules[module], name) is function:
        _local[f"{script()}:{name}"] = function
        return f"{script()}:{name}"
    name = f"{LOCAL}:{name}"
    taken = [key for key in (*_local, *_unloaded) if key == name or key.startswith(f"{name}-")]
    for key in taken:
        if _local.get(key) is function:
            return key
    key = f"{name}-{len(taken) + 1}" if taken else name  # two lambdas have one qualname
    _local[key] = function
    return key


def script() -> str:
    """The script or module that runs; empty: an interactive session or a notebook."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None) or ""
    return os.path.abspath(file) if is_file(f"{file}:") and os.path.isfile(file) else ""


def local() -> dict[str, Callable[..., Any]]:
    for name in [*_unloaded]:
        find(name)
    return dict(_local)


def files() -> list[Any]:
    """The modules of the files that were imported."""
    return [module for name, module in sys.modules.items() if name in _files]


def is_code(name: str) -> bool:
    """Whether using this name imports a module; a function that this process was given does not."""
    return name.rpartition(":")[0] not in ("", LOCAL)


def is_file(name: str) -> bool:
    """Whether the name is /path/file.py:attribute."""
    return name.rpartition(":")[0].endswith(".py")


def is_unstable(name: str) -> bool:
    """Whether the same function may have another name in another process or directory."""
    return is_file(name) or name.startswith(f"{LOCAL}:")


def absolute(name: str) -> str:
    """The name with the file's full path, if it names a file."""
    file, colon, attribute = name.rpartition(":")
    return f"{os.path.abspath(os.path.expanduser(file))}{colon}{attribute}" if is_file(name) else name


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
    before = _allowed
    restrict(names)
    try:
        yield
    finally:
        restrict(before)


def restrict(names: Collection[str] | None) -> None:
    """From now on `find` imports nothing but these; None: anything."""
    global _allowed
    _allowed = names


def allowed() -> frozenset[str] | None:
    return None if _allowed is None else frozenset(_allowed)


def starts_run() -> None:
    """Called before a run starts. Raises StartsRun in a file that is only imported: it must not train again."""
    if _importing:
        raise StartsRun(_importing[-1])


def find(name: str) -> Callable[..., Any] | None:
    """The callable that `module:attribute` or `file.py:attribute` names; None if the module has no such attribute.

    The attribute may be the id of an environment that the file registers with Gymnasium.
    """
    if _allowed is not None and name not in _allowed:
        raise UserError(f"{name!r} is code, and importing it was not allowed here.")
    name = absolute(name)
    if name in _unloaded:
        _local[name] = _unloaded.pop(name)()
    if name in _local:
        return _local[name]
    module, _, attribute = name.rpartition(":")
    if module == LOCAL:
        known = attribute if attribute.isidentifier() else "..."
        raise UserError(
            f"{name!r} was passed from Python and cannot be imported; pass it again (env={known}, or network={known}), or "
            f"put it in a file and name that (--env path/file.py:{known})."
        )
    if is_file(name):
        return _find_in_file(Path(module), attribute)
    if not module or module.startswith("."):
        raise UserError(f"{name!r} must be module:callable or path/file.py:callable, as in my_package.my_module:make.")
    return _attribute(_import(name, module), attribute)


def _import(name: str, module: str) -> Any:
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is None and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # a module beside the user, whom no installed one precedes
        with _imports(module):
            return importlib.import_module(module)
    except (Exception, SystemExit, StartsRun) as error:  # importing a module may raise anything
        raise UserError(f"{name!r}: {module} cannot be imported ({_why(error)}); is it on the Python path?") from error


def _attribute(found: Any, attribute: str) -> Callable[..., Any] | None:
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return found if callable(found) else None


def _find_in_file(path: Path, attribute: str) -> Callable[..., Any]:
    name, known = f"{path}:{attribute}", sys.modules.get(str(path))
    module, stopped = (known, None) if known is not None else _load(name, path)
    found = _attribute(module, attribute) or _registered(attribute)
    if found is None and stopped is not None:
        raise UserError(
            f"{name!r}: {path.name} stops before it defines {attribute} when it is imported ({_why(stopped)}); put what it "
            "runs below `if __name__ == '__main__':`."
        )
    if found is None:
        raise UserError(f"{path} has no class or function {attribute!r}, and registers no environment of that name.")
    sys.modules[str(path)] = module
    _files.add(str(path))
    return found


def _registered(name: str) -> Callable[..., Any] | None:
    """Makes an environment that is registered with Gymnasium."""
    gym = sys.modules.get("gymnasium")
    return None if gym is None or name not in gym.registry else partial(gym.make, name, disable_env_checker=True)


def _load(name: str, path: Path) -> tuple[Any, BaseException | None]:
    """The module of a file, and what ended it before its end: a run that it started, or an exit. That it defined what it
    is imported for is enough.

    The module is named as the path: the guard `if __name__ == "__main__"` holds. It finds what is beside it.
    """
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[str(path)] = module  # dataclasses look there
    try:
        with _imports(str(path)), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Overriding environment")  # the starter of this process sent it too
            spec.loader.exec_module(module)
    except (SystemExit, StartsRun) as error:
        return module, error
    except Exception as error:
        raise UserError(f"{name!r}: {path.name} cannot be imported ({_why(error)}).") from error
    finally:
        del sys.modules[str(path)]
    return module, None


@contextlib.contextmanager
def _imports(what: str) -> Iterator[None]:
    _importing.append(what)
    try:
        yield
    finally:
        _importing.pop()


def _why(error: BaseException) -> str:
    return "it starts a run" if isinstance(error, StartsRun) else f"{type(error).__name__}: {error}"
