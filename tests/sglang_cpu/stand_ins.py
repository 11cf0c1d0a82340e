"""What a real SGLang on a CPU lacks: packages that it imports at its start and that no model on a CPU calls,
operators that such packages register, and memory to pin.

A `.pth` file of the environment imports this module into each of its Python processes. An import that nothing
else can answer is answered by an empty module, each attribute of which is a class that does nothing: it
serves as decorator, base, callable, subscript and annotation. Who asks whether such a package is installed is
told the truth, no.
"""

import functools
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType

PACKAGES = frozenset(
    {
        "IPython",
        "jsonschema",
        "mistral_common",
        "pynvml",
        "sgl_kernel",
        "soundfile",
        "tiktoken",
        "triton",
        "zstandard",
    }
)

VERSION = "3.5.0"  # SGLang compares triton's


class Nothing(type):
    """The type of the classes that do nothing, and of whatever one gets from them."""

    def __getattr__(cls, name):
        # No private protocol is claimed; and `triton.runtime.driver.active` has to fail, which says that
        # there is no device.
        if name == "active" or name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)

    def __call__(cls, *arguments, **named):
        if not named and len(arguments) == 1 and isinstance(arguments[0], (type, FunctionType)):
            return arguments[0]  # used as a decorator, with or without options before
        return nothing(cls.__name__)

    def __getitem__(cls, key):
        return cls

    def __or__(cls, other):
        return cls

    def __ror__(cls, other):
        return cls

    def __iter__(cls):
        return iter(())


def nothing(name):
    return Nothing(name, (), {})


class EmptyModule(ModuleType):
    __version__ = VERSION

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)


class StandIns:
    """The last of the import system's finders, and the loader of what it finds."""

    def __init__(self):
        self._torch_has_looked = False
        self._is_torch_looking = False

    def find_spec(self, name, path=None, target=None):
        if not is_stand_in(name) or self._is_torch_looking:
            return None
        if name.partition(".")[0] == "triton" and not self._torch_has_looked:
            self._let_torch_look()
        return ModuleSpec(name, self, is_package=True)

    def _let_torch_look(self):
        """torch remembers that there is no triton; if it met the stand-in it would compile kernels with
        it.
        """
        self._torch_has_looked = self._is_torch_looking = True
        try:
            from torch.utils._triton import has_triton_package

            assert not has_triton_package()
            import torch._inductor.runtime.triton_compat  # noqa: F401
        finally:
            self._is_torch_looking = False

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        return


class Arrivals:
    """The first of the import system's finders.

    It finds nothing: it sees packages of SGLang come that pin memory wherever they run, and torchvision,
    which models that see need.
    """

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not declared:
            declare_operators()
        if name == "sglang.srt.lora":
            leave_memory_unpinned()
        if name == "sglang.srt.state_capturer":
            leave_memory_unregistered()
        return


OPERATORS = {
    "torchvision": {
        "nms": "(Tensor a, Tensor b, float c) -> Tensor",
        "qnms": "(Tensor a, Tensor b, float c) -> Tensor",
    },
    "sgl_kernel": dict.fromkeys(
        (
            "chunk_gated_delta_rule_cpu",
            "fused_gdn_gating_cpu",
            "fused_qk_gemma_rmsnorm_cpu",
            "fused_qk_gemma_rmsnorm_with_gate_cpu",
            "fused_qk_rmsnorm_cpu",
            "fused_qkvzba_split_reshape_cat_contiguous_cpu",
            "fused_qkvzba_split_reshape_cat_cpu",
            "fused_sigmoid_mul_cpu",
        ),
        "(Tensor a) -> Tensor",
    ),
}
declared = []
"""torch forgets operators with the object that declared them."""


def declare_operators():
    """Declare operators whose libraries are built for CUDA. Imports ask for them, and nothing calls them."""
    import torch

    for namespace, operators in OPERATORS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        declared.append(library)
        for name, signature in operators.items():
            library.define(f"{name}{signature}")


def leave_memory_unregistered():
    """The record of routed experts registers its memory with CUDA."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *arguments, **named: None


def leave_memory_unpinned():
    """Memory is pinned for copies to an accelerator; where there is none, torch refuses to."""
    import torch

    for name in ("arange", "empty", "ones", "tensor", "zeros"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


def without_pinning(make):
    @functools.wraps(make)
    def unpinned(*arguments, pin_memory=False, **named):
        return make(*arguments, **named)

    return unpinned


def is_stand_in(name):
    return name.partition(".")[0] in PACKAGES


def install():
    """Answer imports that fail otherwise, and let `importlib.util.find_spec` go on saying what is
    installed.
    """
    stand_ins, ask = StandIns(), importlib.util.find_spec

    @functools.wraps(ask)
    def find_spec(name, package=None):
        spec = ask(name, package)
        return None if spec is not None and spec.loader is stand_ins else spec

    importlib.util.find_spec = find_spec
    sys.meta_path.append(stand_ins)
    sys.meta_path.insert(0, Arrivals())


install()
