"""Import placeholder for sgl_kernel, the GPU kernels of SGLang (see ``_import_placeholder``)."""

from _import_placeholder import become_placeholder

__version__ = "0.0.0+placeholder"
become_placeholder(__name__)
