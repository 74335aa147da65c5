"""What the verifier knows about a graph, found out without the passes' views: roles, effects, storages, collectives.

``operators`` finds out what an operator does to memory by running it, ``communication`` what a collective is from its
name, ``higher_order`` what a body does by looking into it. ``nodes`` combines this for one node, ``storages`` and
``view`` for a graph. Nothing here imports ``ir.view``, ``ir.storages``, ``ir.memory`` or reads a schema's aliasing: the
passes rely on those, and an error there must not hide itself.
"""
