"""What the verifier knows about a graph, found out without the passes' views: roles, effects, storages, collectives.

``operators`` knows what an operator does to memory from having run it, ``communication`` what a collective is from its
name, ``higher_order`` what a body does from looking into it. ``nodes`` puts this together for one node, ``storages``
and ``view`` for a graph. Nothing here imports ``ir.view``, ``ir.storages``, ``ir.memory`` or a schema's aliasing: the
passes stand on those, and an error there must not hide itself.
"""
