"""What a graph means to the passes: read-only views over an FX graph.

``groups`` resolves process groups, ``ops`` classifies what a node does, ``storages`` says which nodes share memory,
``view`` puts them together as :class:`~inductor_passes.ir.view.GraphView`.
"""
