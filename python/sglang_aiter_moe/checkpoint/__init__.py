"""MXFP4 expert weights in files: names, formats, what layout they are in, laying them out offline."""
