"""Has PyTorch imported without two of its parts that serving never uses, until somebody asks for them.

`import torch` is most of a start. A third of it is `torch.export`, which turns models into graphs, and
`torch._meta_registrations`, shapes of operators for tensors without contents, which compilers need. In the
engine process a module that stands for them is imported instead; whoever takes anything from it, or imports
PyTorch's compiler, gets the real one then.

Only for versions of PyTorch with which this was tried: the order of imports inside of it is its own affair.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Sequence

LEFT_OUT = ("torch.export", "torch._meta_registrations")
# Whoever imports one of these needs all of PyTorch.
COMPILERS = ("torch._dynamo", "torch._inductor")
TRIED_VERSIONS = ("2.13.", "2.15.")


def leave_out() -> bool:
    """From now on, import PyTorch without those parts. False, and nothing done, where that was not tried."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    if "torch" in sys.modules or not version.startswith(TRIED_VERSIONS):
        return False
    sys.meta_path.insert(0, _Finder())
    return True


class _Later(types.ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are left out, and notices who needs them."""

    def __init__(self) -> None:
        self.wanted = set(LEFT_OUT)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self.wanted:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if not fullname.startswith("torch."):
            return None
        parent = fullname.rpartition(".")[0]
        if isinstance(sys.modules.get(parent), _Later):
            # The path that was looked for is the stand-in's, which has none.
            real = _real(parent)
            if fullname in sys.modules:  # by its parent
                return _Loaded.spec_of(sys.modules[fullname])
            return importlib.machinery.PathFinder.find_spec(fullname, real.__path__, target)
        if fullname in COMPILERS:
            for name in LEFT_OUT:
                _real(name)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Later(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to do yet."""


class _Loaded(importlib.abc.Loader):
    """For a module that its parent's import has loaded, while it was being looked for.

    The import system then goes by that module's own specification, and would run it a second time.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    @classmethod
    def spec_of(cls, module: types.ModuleType) -> importlib.machinery.ModuleSpec:
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, cls(module))
        return module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


def _real(name: str) -> types.ModuleType:
    """The module itself, imported in place of what stands for it."""
    if isinstance(sys.modules.get(name), _Later):
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                finder.wanted.discard(name)
        del sys.modules[name]
        parent, _, own = name.rpartition(".")
        setattr(sys.modules[parent], own, importlib.import_module(name))
    return sys.modules[name]
