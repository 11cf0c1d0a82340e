"""Part of `verl_shim`; see there."""

from pkgutil import extend_path

__path__ = extend_path([], __name__)
