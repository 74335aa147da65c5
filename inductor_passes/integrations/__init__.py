"""Models that a training framework wraps: one file per framework, imported only by users of that framework.

    from inductor_passes.integrations.accelerate import adopt_prepared
    from inductor_passes.integrations.transformers import AdoptCallback
    from inductor_passes.integrations.fabric import AdoptDDPStrategy, AdoptModelParallelStrategy
    from inductor_passes.integrations.torchtitan import adopting

Each uses its framework's public places for extensions: a callback, a strategy, a function of the model's description.
Nothing of a framework is patched.
"""
