"""Import placeholder for datasets, which SGLang's benchmark client imports for data that is not used here."""

from _import_placeholder import become_placeholder

__version__ = "0.0.0+placeholder"
become_placeholder(__name__)
