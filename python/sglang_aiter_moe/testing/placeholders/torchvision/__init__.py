"""Import placeholder for torchvision (see ``_import_placeholder``)."""

from _import_placeholder import become_placeholder

__version__ = "0.0.0+placeholder"
become_placeholder(__name__)
