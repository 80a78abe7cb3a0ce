"""Every combination that can make an MXFP4 layer compute nonsense, run through SGLang's own code.

``cells`` says what is combined, ``layer`` what each combination's layer is, ``rocm`` how a process looks like
one on ROCm, ``one_cell`` runs a cell, ``expected`` knows the right answer, ``classes`` what came of it,
``worker`` runs many cells in one process, ``run`` many processes, ``kinds`` names what went wrong silently,
``stored``, ``report`` and ``picture`` make ``docs/matrix.md``.
"""
