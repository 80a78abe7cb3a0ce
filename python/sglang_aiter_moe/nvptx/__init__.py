"""An interpreter of the PTX that Triton generates for sm_90a, on a CPU with numpy.

**From text to a run.** ``text.parse`` gives a ``Program`` of ``Kernel`` objects with ``Instruction`` objects.
``semantics.build(instruction)`` decodes one of them, once, to an operation: a function of a :class:`state.Group`.
``machine.run`` executes operations.

**Tables.** A subject is a module with ``TABLE``: the opcode's longest dotted prefix (``"add"``, ``"ld"``,
``"wgmma.mma_async"``, ``"cp.async.bulk.tensor"``) -> builder ``build(instruction) -> operation``. The parts of the
name behind the prefix are ``instruction.modifiers`` (a tuple of texts, ``"shared::cluster"`` is one). A builder
refuses what it does not know with ``raise decode.refuse(instruction, "what")``. The guard (``@%p``) is applied outside:
the operation gets a group whose mask holds only lanes that act, and is not called when there is none.

**Warps side by side.** Warps of several CTAs are rows of every register: an array [rows, 32] of bool (pred), uint16,
uint32 or uint64; row = warp * CTAs + CTA. A ``Group`` is the warps that stand at one instruction::

    group.rows      slice or index array: values[slot][group.rows] is [n, 32]
    group.n .ids .warp .cta    how many; rows, warp in its CTA, CTA in the batch (int arrays [n])
    group.mask      bool [n, 32], lanes that act; None: all
    group.get(slot) group.put(slot, values)      unchecked read; write of the lanes that act
    group.check(slot)           Fault for lanes that act where nothing wrote the register, or a result is in flight
    group.fly(slot) group.land(slot)             mark as in flight; unmark (put does not: it refuses)
    group.narrow(mask) group.subset(positions)   fewer lanes; fewer rows
    group.state     the batch: .shared .memory .tasks .barriers .late .checked

``decode.source(instruction, operand, kind)`` gives a function group -> array [n, 32] (or a scalar for a constant) that
checks. ``decode.value`` is the same for arithmetic: what nothing has written makes the result unknown, byte by byte,
and a Fault where it is used (an address, a branch, a store to global memory). ``decode.target(...)`` gives a function
of (group, array) that writes. ``kind`` is a PTX type: "u32", "f32", ...

**Waiting.** An operation returns None, or bool [n, 32]: the lanes that pass. The others stay at the instruction and
execute it again when something has happened (``state.event()``: barriers, mbarriers and global writes call it).

**Asynchrony** (``asynchronous.py``). ``state.tasks.issue(kind, group, effect)`` registers ``effect(group)``, which is
called with the rows that wait: a subset of the issuing group, with the issuing mask. ``commit(kind, group)`` and
``wait(kind, group, at_most)`` are the groups of cp.async and wgmma. Late mode runs an effect when its wait completes,
early mode when it is issued.
``state.barriers.attach(cta, address, nbytes, effect)`` is an effect (without arguments) that completes ``nbytes`` of an
mbarrier's transaction.

**Shared memory** (``shared.py``), one window a CTA, addresses from ``shared.BASE`` on::

    shared.load(cta, address, nbytes, proxy="generic") -> uint8 [..., nbytes]   cta broadcasts to address
    shared.store(cta, address, data, proxy="generic")   data uint8 [..., nbytes]
    shared.fly(cta, address, nbytes)                    these bytes are on their way: reading them is a Fault

``proxy="async"`` is what wgmma and bulk copies use: it refuses bytes that a generic store wrote with no
``fence.proxy.async`` since.

**Memory**: ``amdgpu.memory.Memory``. Parameters lie in it, one after another, read-only: a tensor map's address is that
of its 128 bytes. Faults are ``amdgpu.errors.Fault``, with ``lane`` = position * 32 + lane in the group.
"""
